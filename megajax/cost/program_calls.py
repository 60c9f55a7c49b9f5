"""Finds the FLOPs and bytes of custom calls, by which a compiled program runs library kernels.

A call of a vendor library (cuBLAS, cuDNN, oneDNN) has a configuration in the text of the program,
which says what it computes. megajax's own Mosaic GPU kernels write their FLOPs and bytes into the
name of the scope in which they are launched (pallas_kernels/work.py). For any other call, the bytes
are those of its operands and results; its FLOPs are unknown and count as 0, with a warning.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence

from megajax.cost import program_work as work
from megajax.cost.hlo_text import Array, Instruction

# Markers that the compiler leaves in the program and that launch nothing.
MARKERS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer",
           "annotate_device_placement", "xla.sdy.FuncResultSharding")  # fmt: skip
# Calls without floating-point operations, by the beginning of their target.
KNOWN = {
    "__cub$": "sort", "TopK": "sort", "__gpu$TopK": "sort", "cu_threefry2x32": "random",
    "PadToStatic": "copy", "SliceToDynamic": "copy", "__nop": "copy",
}  # fmt: skip
PRODUCTS = ("__cublas$", "__onednn$matmul")
# A kernel's own count (pallas_kernels/work.py).
KERNEL = re.compile(
    r"kernel_(\w+)\.flops_(\d+)\.read_(\d+)\.written_(\d+)\.given_(\d+)\.product_(\d+_\d+_\d+_\d+)"
)
# What the record of a kernel is, by a word of its name.
KERNELS = {
    "attention_combine": "reduction", "attention": "attention", "gemm": "product",
    "grouped": "product", "tile_sparse": "product", "norm": "reduction", "reduce_": "reduction",
    "all_gather": "collective", "send_rows": "collective", "quant_matmul": "product",
    "quantize": "fusion",
}  # fmt: skip
# Matrix products of fused attention: 2 in the forward pass and 5 in the backward pass, one of which
# computes the scores again (FlashAttention-2, section 3.1).
FORWARD, BACKWARD = 2, 5


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known of a call. kind: of record.KINDS. opcode: of record.OPCODES.

    bytes_read, bytes_written: where they are not its operands and results.
    """

    kind: str
    flops: float = 0.0
    product: work.Product | None = None
    opcode: str = "custom"
    bytes_read: float | None = None
    bytes_written: float | None = None
    transcendentals: float = 0.0
    name: str = ""


def target(one: Instruction) -> str:
    """Returns what a custom call calls."""
    return one.get("custom_call_target").strip('"')


def as_dot(one: Instruction) -> Instruction:
    """Returns a library's product as the dot that it is; anything else as it is."""
    if one.opcode != "custom-call" or "contracting_dimensions" not in one.attributes:
        return one
    if not target(one).startswith(PRODUCTS):
        return one
    dims = {
        short: ",".join(re.findall(r"\d+", found[1]))
        for short, long in (("lhs_contracting_dims", "lhs_contracting_dimensions"),
                            ("rhs_contracting_dims", "rhs_contracting_dimensions"),
                            ("lhs_batch_dims", "lhs_batch_dimensions"),
                            ("rhs_batch_dims", "rhs_batch_dimensions"))
        if (found := re.search(rf'"{long}":\s*\[([^\]]*)\]', one.attributes))
    }  # fmt: skip
    text = ", ".join(f"{name}={{{value}}}" for name, value in dims.items())
    precision = re.search(r'"operand_precision":\[([^\]]*)\]', one.attributes)
    if precision and "HIGHEST" in precision[1]:
        text += ", operand_precision={highest,highest}"
    # The second array of the result is the library's workspace, which is no part of the product.
    shape = re.match(r"\((\w+\[[\d,]*\](?:\{[^}]*\})?)", one.shape)
    return dataclasses.replace(
        one, opcode="dot", shape=shape[1] if shape else one.shape, attributes=", " + text
    )


def call(one: Instruction, around: Mapping[str, Instruction]) -> Call:
    """Returns what is known of a custom call's work."""
    name = target(one)
    operands = [around[n].array for n in one.operands if n in around]
    if kernels := KERNEL.findall(one.op_name):
        given = sum(a.nbytes for n in one.operands if n in around for a in around[n].arrays)
        return _kernel(kernels[-1], given)
    readers: dict[str, Callable[..., Call]] = {"__cudnn$conv": _convolution, "__cudnn$fmha": _fmha}
    for prefix, reader in readers.items():
        if name.startswith(prefix):
            return reader(one, operands)
    for prefix, kind in KNOWN.items():
        if name.startswith(prefix):
            return Call(kind, opcode=kind)
    unknown(f"the custom call {name}")
    return Call("custom")


def unknown(what: str) -> None:
    """Warns that an operation's arithmetic is not counted."""
    warnings.warn(
        f"{what} is not known to the cost model: its FLOPs count as 0, only its bytes are counted",
        stacklevel=2,
    )


def _kernel(found: tuple[str, ...], given: float) -> Call:
    """Returns the work that a kernel of megajax states in its scope's name.

    Under `jax.vmap` one launch does the work of several, which the bytes of the operands (`given`)
    show: they are a multiple of those that the name states, and the work is multiplied likewise.
    """
    name, *numbers, shape = found
    flops, read, written, told = map(float, numbers)
    rows = max(round(given / told), 1) if told else 1
    kind = next((kind for word, kind in KERNELS.items() if word in name), "custom")
    opcode = {"attention": "attention", "product": "dot", "reduction": "reduce",
              "collective": "collective"}.get(kind, "custom")  # fmt: skip
    batch, m, n, k = (int(i) for i in shape.split("_"))
    product = work.Product(batch * rows, m, n, k) if batch else None
    return Call(kind, rows * flops, product, opcode, rows * read, rows * written, name=name)


def _convolution(one: Instruction, operands: Sequence[Array]) -> Call:
    """Returns the work of one of cuDNN's three convolutions.

    They are the forward one (y from x and w) and the gradients (dx from dy and w, dw from x and
    dy). The labels of dimensions in the text of all three are those of the forward one.
    """
    first, second, result = operands[0], operands[1], one.array
    if "BackwardInput" in target(one):
        x, w, y = result, second, first
    elif "BackwardFilter" in target(one):
        x, w, y = first, result, second
    else:
        x, w, y = first, second, result
    product, flops = work.convolution(one, x, w, y)
    return Call("convolution", flops, product, "convolution", bytes_written=result.nbytes)


def _fmha(one: Instruction, operands: Sequence[Array]) -> Call:
    """Returns the work of cuDNN's attention, whose text has its (rows, heads, queries, keys).

    Only the pairs of a query and a key that the mask leaves are counted (`useful_pairs`).
    """
    text = one.attributes
    found = re.search(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]', text)
    if found is None:
        unknown(f"the shape of {target(one)}")
        return Call("attention", opcode="attention")
    *outer, queries, keys = (int(i) for i in re.findall(r"\d+", found[1]))
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', text)
    pairs = useful_pairs(queries, keys, "CAUSAL" in text, int(window[1]) if window else 0)
    heads = math.prod(outer)
    products = BACKWARD if "Backward" in target(one) else FORWARD
    width = operands[0].dims[-1]
    flops = 2.0 * products * heads * pairs * width
    product = work.Product(heads, queries, keys, width)
    # Behind the results stands the library's workspace.
    written = sum(array.nbytes for array in one.arrays if array.is_float)
    return Call(
        "attention", flops, product, "attention", bytes_written=written,
        transcendentals=float(heads * pairs),
    )  # fmt: skip


def useful_pairs(queries: int, keys: int, causal: bool, window: int = 0) -> int:
    """Returns the pairs of a query and a key that a mask leaves. window: 0 for none."""
    if not causal:
        return queries * keys
    reach = min(window or keys, keys)
    # Query i sees min(i + 1, reach) keys; both begin at the same position.
    rising = min(reach, queries)
    return rising * (rising + 1) // 2 + (queries - rising) * reach
