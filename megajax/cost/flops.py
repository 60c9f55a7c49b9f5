"""Model FLOPs of training a decoder, and MFU, in the two conventions that papers use.

Forward and backward cost 6 FLOPs a parameter and token (2 forward, 4 backward); attention adds
12 L H K s_eff, where s_eff is how many keys a query is credited with. 'megatron': all s keys, as if
attention were not causal (Megatron-LM, PaLM; MegaScale's tables follow it). 'causal': the keys a
query really sees, so a sliding window counts with its own size. Recomputation is never credited.
Source: MegaScale tables 2 and 3 reproduce to 0.1 % (tests/cost/test_flops.py).
"""

from dataclasses import dataclass
from typing import Literal

Convention = Literal["megatron", "causal"]
Remat = Literal["none", "full", "outputs", "dots"]

# How often the backward pass makes a forward value again, by what is kept (models/parts.py). An
# attention whose result is kept makes its weights again: one of its two products.
RECOMPUTED = {
    "none": {},
    "dots": {"norm": 1.0, "attention": 1.0, "activation": 1.0},
    "outputs": {"norm": 1.0, "input": 1.0, "attention": 0.5, "activation": 1.0},
    "full": {"norm": 1.0, "input": 1.0, "attention": 1.0, "activation": 1.0, "output": 1.0},
}


@dataclass(frozen=True)
class DecoderWork:
    """What the FLOPs of a decoder depend on.

    matmul_params: parameters that a token multiplies, without embedding lookups and head; of a
    mixture of experts only those of the experts that it uses, routed and shared, and the router's.
    attention_width: heads x head width. window: keys a query sees at most; None: all. kv_width:
    key-value heads x head width. hidden: feed-forward width. gated: whether the feed-forward layer
    has two input matrices. parallel: attention and feed-forward side by side (one gather and one
    scatter a block). tied: the head is the embedding. positions: rows of a learned position table.
    """

    layers: int
    width: int
    attention_width: int
    matmul_params: int
    vocab: int
    window: int | None = None
    heads: int = 1
    kv_width: int = 0
    hidden: int = 0
    gated: bool = False
    parallel: bool = False
    tied: bool = False
    positions: int = 0

    @property
    def input_width(self) -> int:
        """Columns of all matrices that read a block's input: q, k, v, up and gate."""
        return self.attention_width + 2 * self.kv_width + (1 + self.gated) * self.hidden

    @property
    def output_width(self) -> int:
        """Rows of all matrices that write to the residual stream."""
        return self.attention_width + self.hidden

    @property
    def table_params(self) -> int:
        """Parameters of embeddings and head."""
        return ((1 if self.tied else 2) * self.vocab + self.positions) * self.width

    @property
    def params(self) -> int:
        """All parameters but norms and biases."""
        return self.matmul_params + self.table_params


def keys_per_query(seq_len: int, window: int | None, convention: Convention) -> float:
    """Returns the mean number of keys a query is credited with."""
    reach = seq_len if window is None else min(window, seq_len)
    if convention == "megatron":
        return reach
    # Query i (from 0) sees min(i + 1, reach) keys.
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len


def train_flops_per_token(work: DecoderWork, seq_len: int, convention: Convention) -> float:
    """Returns FLOPs of one token's forward and backward pass."""
    keys = keys_per_query(seq_len, work.window, convention)
    dense = 6 * work.matmul_params + 6 * work.vocab * work.width
    return dense + 12 * work.layers * work.attention_width * keys


def recomputed_flops_per_token(
    work: DecoderWork, seq_len: int, remat: Remat, loss_chunks: int, keys: float
) -> float:
    """Returns FLOPs that the backward pass spends on making forward values again.

    keys: keys per query that the attention kernel multiplies, visible or not. loss_chunks: above 1
    the logits are made twice. Source: models/parts.py:remat_policy, layers/losses.py.
    """
    again = RECOMPUTED[remat]
    layer = 2 * work.width * work.input_width * again.get("input", 0.0)
    layer += 2 * work.width * work.output_width * again.get("output", 0.0)
    layer += 4 * work.attention_width * keys * again.get("attention", 0.0)
    return work.layers * layer + (2 * work.vocab * work.width if loss_chunks > 1 else 0)


def mfu(tokens_per_s: float, flops_per_token: float, devices: int, peak_flops: float) -> float:
    """Returns model FLOPs utilisation: model FLOP/s over the devices' dense peak, 0..1."""
    return tokens_per_s * flops_per_token / (devices * peak_flops)
