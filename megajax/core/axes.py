"""The vocabulary of dimensions: mesh axes, logical words, and the letters in array names.

Three alphabets that must not be mixed. A mesh axis is a direction of the machine. A word names what
a dimension of an array is; `core.layout` maps words to mesh axes. A letter is a suffix of a Python
variable (`x_BSD`) and lives nowhere else. This module is plain data and imports nothing.
"""

import dataclasses
from collections.abc import Mapping

# Slow links first: `pipe` crosses the cluster, `tensor` is innermost, the NVLink domain.
MESH_AXES = ("pipe", "node", "data", "expert", "context", "tensor")

# Axes that share the gradient of a dense weight: a weight at rest is cut over all of them (ZeRO).
ZERO_AXES = ("node", "data", "expert", "context")

# Axes over which the rows of a batch are cut.
BATCH_AXES = ("node", "data", "expert")

WORDS = {
    "batch": "rows of a batch",
    "seq": "positions of a row",
    "embed": "model width",
    "heads": "query heads",
    "kv_heads": "key-value heads",
    "mlp": "feed-forward width",
    "vocab": "token ids",
    "positions": "learned positions",
    "expert": "experts",
    "router": "experts as a router scores them: never cut, and its weights stay float32 in use",
    "layers": "the stack of equal layers",
    "stage": "pipeline stages",
}

LETTERS = {
    "B": "batch rows",
    "S": "query positions",
    "M": "memory (key) positions",
    "T": "packed tokens",
    "D": "model width",
    "F": "feed-forward width",
    "H": "query heads",
    "G": "key-value heads",
    "K": "head width",
    "V": "vocabulary",
    "L": "layers",
    "N": "(token, expert) pairs in the experts' order",
    "E": "experts",
    "A": "active experts a token",
    "R": "query heads that share a key-value head",
    "Q": "slots an expert",
    "P": "pipeline stages",
    "U": "microbatches",
}


# ---- rules
#
# Rules: the plain data behind a Layout, word -> mesh axes. No jax.


Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Word -> mesh axes, for the places where an array can be. A missing word is not cut.

    stored: parameters at rest. act: activations inside a block. residual: activations on the
    residual stream, between blocks. partial: the axes over which gradients of a weight are partial
    sums; a weight in use is whole over them. sharable: words whose dimension may be shorter than
    the axes that cut it. copies: word -> ranks that hold each entry of such a dimension while it is
    in use: at rest `stored` leaves it uncut, in use `act` cuts it with every entry repeated so
    often.
    """

    stored: Mapping[str, Axes]
    act: Mapping[str, Axes]
    residual: Mapping[str, Axes]
    partial: Axes
    sharable: Axes = ()
    copies: Mapping[str, int] = dataclasses.field(default_factory=dict)
