"""Records: descriptions of what a device launches, which learned cost models predict times from.

An `OpRecord` describes one launched operation of a compiled program (cost/program.py) or of a table
of measured kernels (systems/cdmpp): its FLOPs and bytes, a vector of features and a tree. Features
are in natural units, such as bytes; a predictor takes their logarithms itself. The tree is CDMPP's
compact syntax tree (arXiv 2311.09690, section 4). Its leaves are elementary operations and its
inner nodes are regions, such as the body of a reduction. The position of a leaf is its place in a
pre-order serialisation of the tree, in which each return to a parent also takes a place. FLOPs are
counted by formula: a matrix product has 2 M N K, other arithmetic one for each element of its
result. Transcendental functions are counted separately.

Not here: times. A record does not depend on a device.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.cost.base import ITEMSIZE

FEATURES = (
    "flops", "bytes_read", "bytes_written", "transcendentals", "batch", "m", "n", "k", "elements",
    "rows", "width", "reduced", "reduces_minor", "operands", "indices", "transposed", "itemsize",
    "distance", "cold", "around", "turns", "stride", "stride_right", "run",
    "span", "dilated", "custom", "parts", "jumps",
)  # fmt: skip
# Features of the operation's place in a program (cost/program_body.py); 0 if this is not known.
# They have no part in the hash, so that equal operations at different places have the same one.
PLACE = ("distance", "cold", "around", "turns")
# Classes of a leaf's operation. A new one changes the files' VERSION; FEATURES grow at the end.
OPCODES = (
    "add", "multiply", "divide", "maximum", "compare", "select", "exponential", "power",
    "trigonometric", "convert", "integer", "broadcast", "reshape", "transpose", "copy", "slice",
    "update", "concatenate", "gather", "scatter", "reduce", "dot", "convolution", "attention",
    "sort", "random", "collective", "custom", "other",
)  # fmt: skip
# The columns of a leaf that follow the one-hot encoding of its class.
LEAF_FEATURES = (
    "flops", "bytes_read", "bytes_written", "transcendentals", "elements", "width", "batch", "m",
    "n", "k", "indices", "transposed", "operands", "itemsize", "depth",
)  # fmt: skip
LEAF = len(OPCODES) + len(LEAF_FEATURES)
KINDS = (
    "product", "batched_product", "convolution", "attention", "fusion", "reduction", "copy",
    "gather", "scatter", "sort", "random", "collective", "custom",
)  # fmt: skip
# One floating-point operation for each element of the result. A sum of n elements has n - 1.
ARITHMETIC = ("add", "multiply", "divide", "maximum")
TRANSCENDENTAL = ("exponential", "power", "trigonometric")
# Bytes of an element by data type: those of `cost.base`, and more that compiled programs have.
SIZES = {
    **ITEMSIZE,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "bool": 1,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """The operations of one record.

    leaves: (operations, LEAF) float32, one row an operation in pre-order: a one-hot class of
    OPCODES, then LEAF_FEATURES. positions: (operations,) int32, the place of each leaf in the
    pre-order serialisation, in which each return to a parent takes a place too.
    """

    leaves: np.ndarray
    positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class OpRecord:
    """One operation that a device launches.

    kind: one of KINDS; a 'product' has one weight for all rows. features: float64, in the order of
    FEATURES. flops, nbytes: what one execution computes and moves. executions: how often it runs in
    one call of the program. hash: a digest of the structure and the shapes, without names. dtype:
    the data type of the arithmetic, which decides which peak of a card bounds it. name: the name of
    the instruction, which is in no feature and not in the hash.
    """

    kind: str
    features: np.ndarray
    tree: Tree
    flops: float
    nbytes: float
    executions: float = 1.0
    hash: str = ""
    dtype: str = "float32"
    name: str = ""

    def __getitem__(self, feature: str) -> float:
        """Returns a feature by its name of FEATURES."""
        return float(self.features[FEATURES.index(feature)])

    def within(self, **place: float) -> "OpRecord":
        """Returns the record at a place of a program: values of PLACE."""
        features = self.features.copy()
        for name, value in place.items():
            features[FEATURES.index(name)] = value
        return dataclasses.replace(self, features=features)

    def floor_s(self, card: DeviceCard) -> float:
        """Returns the roofline of the record: the least seconds of one execution on this device."""
        return max(self.flops / peak(card, self.dtype), self.nbytes / card.memory_bytes_per_s)


def peak(card: DeviceCard, dtype: str) -> float:
    """Returns the FLOP/s that bound arithmetic in a data type.

    Without a peak for it on the card: for types of 4 bytes or more (float64, integers) the peak of
    float32, for narrower ones the card's largest.
    """
    largest = max(card.flops.values())
    usual = card.flops.get("float32", largest) if SIZES.get(dtype, 4) >= 4 else largest
    return card.flops.get(dtype) or usual


Node = Mapping[str, Any] | Sequence[Any]  # a leaf's values by name, or the children of a region


def tree(children: Sequence[Node]) -> Tree:
    """Returns the tree whose root has these children.

    A mapping is a leaf: 'opcode' of OPCODES and any LEAF_FEATURES but 'depth', 0 where left out. A
    sequence is a region. Raises: UserError on an unknown name.
    """
    rows: list[np.ndarray] = []
    positions: list[int] = []
    place = 0
    stack = [(iter(children), 1)]  # without recursion: nesting is as deep as the program says
    while stack:
        region, depth = stack[-1]
        node = next(region, None)
        place += 1  # a node, or the return to the parent
        if node is None:
            stack.pop()
        elif isinstance(node, Mapping):
            rows.append(_leaf(node, depth))
            positions.append(place)
            place += 1  # a leaf returns at once
        else:
            stack.append((iter(node), depth + 1))
    leaves = np.stack(rows) if rows else np.zeros((0, LEAF), np.float32)
    return Tree(leaves, np.array(positions, np.int32))


def _leaf(values: Mapping[str, Any], depth: int) -> np.ndarray:
    row = np.zeros(LEAF, np.float32)
    row[_index(OPCODES, values["opcode"], "opcode")] = 1
    for name, value in values.items():
        if name != "opcode":
            row[len(OPCODES) + _index(LEAF_FEATURES, name, "feature of a leaf")] = value
    row[-1] = depth
    return row


def _index(names: Sequence[str], name: str, what: str) -> int:
    if name not in names:
        raise UserError(f"{what}={name} must be one of {', '.join(names)}")
    return names.index(name)


def record(
    kind: str,
    children: Sequence[Node],
    values: Mapping[str, float],
    *,
    dtype: str = "float32",
    executions: float = 1.0,
    name: str = "",
    structure: str = "",
) -> OpRecord:
    """Returns a record of some features by name; those left out are 0.

    structure: what the hash covers beside the kind, data type, features and tree: layouts, the
    edges between operations. Raises: UserError on an unknown kind or feature, and on a feature that
    is negative or not finite.
    """
    _index(KINDS, kind, "kind")
    features = np.zeros(len(FEATURES))
    for feature, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{feature}={value} of a {kind} must be finite and not negative")
        features[_index(FEATURES, feature, "feature")] = value
    grown = tree(children)
    shared = features.copy()  # the threads of a CPU decide how many parts there are
    shared[FEATURES.index("parts")] = min(values.get("parts", 0.0), 1.0)
    hashed = shared[[name not in PLACE for name in FEATURES]]
    parts = (
        kind,
        dtype,
        structure,
        hashed.tobytes(),
        grown.leaves.tobytes(),
        grown.positions.tobytes(),
    )
    return OpRecord(
        kind,
        features,
        grown,
        flops=float(features[0]),
        nbytes=float(features[1] + features[2]),
        executions=executions,
        hash=digest(parts),
        dtype=dtype,
        name=name,
    )


def digest(parts: Iterable[str | bytes]) -> str:
    """Returns 16 hexadecimal digits of these parts, in this order."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()


def itemsize(dtype: str) -> float:
    """Returns the bytes of an element. Raises: UserError on an unknown data type."""
    if dtype not in SIZES:
        raise UserError(f"dtype={dtype} must be one of {', '.join(SIZES)}")
    return SIZES[dtype]


# ---- operators
#
# Makes the records of common operators from their shapes, without a compiled program.
#
# A table of measured kernels (systems/cdmpp/neusight.py) and the planner's operations
# (systems/cdmpp/backend.py) have shapes only. Their records have the features and the tree that the
# same operator would have in a compiled program (cost/program.py).


def product(
    batch: float,
    m: float,
    n: float,
    k: float,
    dtype: str,
    *,
    transposed: int = 0,
    bias: bool = False,
) -> OpRecord:
    """Returns y (batch, m, n) = x (batch, m, k) w (batch, k, n), all in one data type.

    transposed: operands that are read against their layout, 0 to 2. bias: whether n elements are
    added to every row, which are m n additions a batch.
    """
    size = itemsize(dtype)
    written = size * batch * m * n
    dot = {
        "opcode": "dot",
        "flops": 2 * batch * m * n * k,
        "bytes_written": 0 if bias else written,
        "bytes_read": size * batch * (m * k + k * n),
        "elements": batch * m * n,
        "width": k,
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
        "transposed": transposed,
        "operands": 2,
        "itemsize": size,
    }
    added = {
        "opcode": "add",
        "flops": batch * m * n,
        "bytes_read": size * batch * n,
        "bytes_written": written,
        "elements": batch * m * n,
        "width": n,
        "operands": 2,
        "itemsize": size,
    }
    children = [dot, added] if bias else [dot]
    values = {
        **_totals(children),
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
        "elements": batch * m * n,
        "rows": batch * m,
        "width": n,
        "operands": 2 + bias,
        "transposed": transposed,
        "itemsize": size,
    }
    return record("product" if batch == 1 else "batched_product", children, values, dtype=dtype)


def rowwise(
    opcodes: Sequence[str], rows: float, width: float, reads: float, dtype: str
) -> OpRecord:
    """Returns a pass over `rows` rows of `width` elements that writes one array of that shape.

    opcodes: the operations in their order, of OPCODES; a 'reduce' sums over a row. reads: arrays of
    that shape that are read. Softmax: maximum, difference, exponential, sum, quotient.
    """
    size, elements = itemsize(dtype), rows * width
    children = [
        {
            "opcode": code,
            "flops": elements * (code in ARITHMETIC) + rows * (width - 1) * (code == "reduce"),
            "transcendentals": elements * (code in TRANSCENDENTAL),
            "bytes_read": size * reads * elements * (place == 0),
            "bytes_written": size * elements * (place == len(opcodes) - 1),
            "elements": rows if code == "reduce" else elements,
            "width": width,
            "operands": 1 if code in (*TRANSCENDENTAL, "reduce", "convert", "copy") else 2,
            "itemsize": size,
        }
        for place, code in enumerate(opcodes)
    ]
    reduced = elements * sum(code == "reduce" for code in opcodes)
    values = {
        **_totals(children),
        "elements": elements,
        "rows": rows,
        "width": width,
        "reduced": reduced,
        "reduces_minor": float(reduced > 0),
        "operands": reads,
        "itemsize": size,
    }
    return record("reduction" if reduced else "fusion", children, values, dtype=dtype)


def _totals(leaves: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the sums of what adds up over operations."""
    names = ("flops", "bytes_read", "bytes_written", "transcendentals")
    return {name: float(sum(leaf.get(name, 0) for leaf in leaves)) for name in names}
