"""Makes the records of common operators from their shapes, without a compiled program.

A table of measured kernels (systems/cdmpp/neusight.py) and the planner's operations
(systems/cdmpp/backend.py) have shapes only. Their records have the features and the tree that the
same operator would have in a compiled program (cost/program.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megajax.cost.record import ARITHMETIC, TRANSCENDENTAL, OpRecord, itemsize, record


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

    transposed: operands that are read against their layout, 0 to 2. bias: of n elements, added to
    every row: m n additions a batch.
    """
    size = itemsize(dtype)
    written = size * batch * m * n
    dot = {
        "opcode": "dot", "flops": 2 * batch * m * n * k, "bytes_written": 0 if bias else written,
        "bytes_read": size * batch * (m * k + k * n), "elements": batch * m * n, "width": k,
        "batch": batch, "m": m, "n": n, "k": k, "transposed": transposed, "operands": 2,
        "itemsize": size,
    }  # fmt: skip
    added = {
        "opcode": "add", "flops": batch * m * n, "bytes_read": size * batch * n,
        "bytes_written": written, "elements": batch * m * n, "width": n, "operands": 2,
        "itemsize": size,
    }  # fmt: skip
    children = [dot, added] if bias else [dot]
    values = {
        **_totals(children), "batch": batch, "m": m, "n": n, "k": k, "elements": batch * m * n,
        "rows": batch * m, "width": n, "operands": 2 + bias, "transposed": transposed,
        "itemsize": size,
    }  # fmt: skip
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
        **_totals(children), "elements": elements, "rows": rows, "width": width,
        "reduced": reduced, "reduces_minor": float(reduced > 0), "operands": reads,
        "itemsize": size,
    }  # fmt: skip
    return record("reduction" if reduced else "fusion", children, values, dtype=dtype)


def _totals(leaves: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the sums of what adds up over operations."""
    names = ("flops", "bytes_read", "bytes_written", "transcendentals")
    return {name: float(sum(leaf.get(name, 0) for leaf in leaves)) for name in names}
