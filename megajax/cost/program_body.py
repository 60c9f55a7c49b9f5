"""Reads a launched instruction as a region: the operations inside it, and the bytes that it moves.

The region of a fusion has all operations of its computation; the region of any other instruction
has one operation. Operations are visited from the result backwards, operands in their order; the
operands of a commuting operation such as add are sorted by their structure. So neither names nor
the order of independent lines changes a record.

Bytes are counted by demand, from the result backwards: an operation needs as many elements of each
operand as its own demanded elements are computed from. A slice needs its part only. An operation
that updates a parameter in place needs nothing of it and writes the updated part only.
"""

import dataclasses
import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megajax.cost import program_work as work
from megajax.cost.hlo import Array, Instruction, Module
from megajax.cost.record import TRANSCENDENTAL, digest

# ---- program calls
#
# Finds the FLOPs and bytes of custom calls, by which a compiled program runs library kernels.
#
# A call of a vendor library (cuBLAS, cuDNN, oneDNN) has a configuration in the text of the program,
# which says what it computes. megajax's own Mosaic GPU kernels write their FLOPs and bytes into the
# name of the scope in which they are launched (pallas_kernels/work.py). For any other call, the
# bytes are those of its operands and results; its FLOPs are unknown and count as 0, with a warning.


# Markers that the compiler leaves in the program and that launch nothing.
MARKERS = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "AllocateBuffer",
    "annotate_device_placement",
    "xla.sdy.FuncResultSharding",
)
# Calls without floating-point operations, by the beginning of their target.
KNOWN = {
    "__cub$": "sort",
    "TopK": "sort",
    "__gpu$TopK": "sort",
    "cu_threefry2x32": "random",
    "PadToStatic": "copy",
    "SliceToDynamic": "copy",
    "__nop": "copy",
}
PRODUCTS = ("__cublas$", "__onednn$matmul")
# A kernel's own count (pallas_kernels/work.py).
KERNEL = re.compile(
    r"kernel_(\w+)\.flops_(\d+)\.read_(\d+)\.written_(\d+)\.given_(\d+)\.product_(\d+_\d+_\d+_\d+)"
)
# What the record of a kernel is, by a word of its name.
KERNELS = {
    "attention_combine": "reduction",
    "attention": "attention",
    "gemm": "product",
    "grouped": "product",
    "tile_sparse": "product",
    "norm": "reduction",
    "reduce_": "reduction",
    "all_gather": "collective",
    "send_rows": "collective",
    "quant_matmul": "product",
    "quantize": "fusion",
}
# Matrix products of fused attention: 2 in the forward pass and 5 in the backward pass, one of which
# computes the scores again (FlashAttention-2, section 3.1).
FORWARD, BACKWARD = 2, 5


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known of a call. kind: one of record.KINDS. opcode: one of record.OPCODES.

    bytes_read, bytes_written: None: the bytes of all operands, and of all results.
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
        short: ",".join(re.findall(r"\d+", match[1]))
        for short, long in (
            ("lhs_contracting_dims", "lhs_contracting_dimensions"),
            ("rhs_contracting_dims", "rhs_contracting_dimensions"),
            ("lhs_batch_dims", "lhs_batch_dimensions"),
            ("rhs_batch_dims", "rhs_batch_dimensions"),
        )
        if (match := re.search(rf'"{long}":\s*\[([^\]]*)\]', one.attributes))
    }
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
        operand_bytes = sum(a.nbytes for n in one.operands if n in around for a in around[n].arrays)
        return _kernel(kernels[-1], operand_bytes)
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


def _kernel(fields: tuple[str, ...], operand_bytes: float) -> Call:
    """Returns the work that a kernel of megajax states in its scope's name.

    Under `jax.vmap` one launch does the work of several, which `operand_bytes` shows: they are a
    multiple of the bytes that the name states, and the work is multiplied likewise.
    """
    name, *numbers, shape = fields
    flops, read, written, told = map(float, numbers)
    rows = max(round(operand_bytes / told), 1) if told else 1
    kind = next((kind for word, kind in KERNELS.items() if word in name), "custom")
    opcode = {
        "attention": "attention",
        "product": "dot",
        "reduction": "reduce",
        "collective": "collective",
    }.get(kind, "custom")
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
    scores = re.search(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]', text)
    if scores is None:
        unknown(f"the shape of {target(one)}")
        return Call("attention", opcode="attention")
    *outer, queries, keys = (int(i) for i in re.findall(r"\d+", scores[1]))
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
        "attention",
        flops,
        product,
        "attention",
        bytes_written=written,
        transcendentals=float(heads * pairs),
    )


def useful_pairs(queries: int, keys: int, causal: bool, window: int = 0) -> int:
    """Returns the pairs of a query and a key that a mask leaves. window: 0 for none."""
    if not causal:
        return queries * keys
    reach = min(window or keys, keys)
    # Query i sees min(i + 1, reach) keys; both begin at the same position.
    rising = min(reach, queries)
    return rising * (rising + 1) // 2 + (queries - rising) * reach


# ---- program body


_STRUCTURE = re.compile(
    r"\b(dimensions|window|dim_labels|\w+_dims|slice_sizes|dynamic_slice_sizes|padding|"
    r"feature_group_count|batch_group_count|index_vector_dim|operand_precision|algorithm|"
    r"is_stable|custom_call_target)=(\{[^{}]*\}|[^\s,]+)"
)
PASS = ("bitcast", "get-tuple-element", "opt-barrier", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class Region:
    """The operations of a launched instruction, by name, parameters included.

    root: the operation whose result is that of the instruction. module: the module it is from.
    """

    instructions: Mapping[str, Instruction]
    root: Instruction
    module: Module

    def array(self, name: str) -> Array:
        """Returns the (first) array that an operation makes."""
        return self.instructions[name].array

    def operands(self, one: Instruction) -> list[Array]:
        """Returns the arrays of an operation's operands."""
        return [self.array(name) for name in one.operands if name in self.instructions]

    def source(self, name: str) -> Instruction:
        """Returns the operation that computes a value, behind bitcasts and elements of tuples."""
        one = self.instructions[name]
        while one.opcode in PASS and one.operands and one.operands[0] in self.instructions:
            one = self.instructions[one.operands[0]]
        return one

    def body(self, one: Instruction) -> Mapping[str, Instruction]:
        """Returns the computation that a reduction or a scatter calls."""
        return self.module.instructions(one.called[0]) if one.called else {}

    @functools.cached_property
    def outputs(self) -> list[Instruction]:
        """The operations that write memory, each once, in the order of the results."""
        names = self.root.operands if self.root.opcode == "tuple" else (self.root.name,)
        outputs = [self.source(name) for name in names if name in self.instructions]
        return list({one.name: one for one in outputs or [self.root]}.values())

    @functools.cached_property
    def in_place(self) -> frozenset[str]:
        """Names of updates and scatters into a parameter, which write only their part."""
        return frozenset(
            one.name
            for one in self.outputs
            if one.opcode in ("dynamic-update-slice", "scatter")
            and one.operands[0] in self.instructions
            and self.source(one.operands[0]).opcode == "parameter"
        )

    @functools.cached_property
    def launches(self) -> dict[str, Call]:
        """{name of a call of a library or kernel: what is known of its work}."""
        return {
            one.name: call(one, self.instructions)
            for one in self.order
            if one.opcode == "custom-call"
        }

    @functools.cached_property
    def kernel(self) -> tuple[str, Call] | None:
        """(name, work) of the first call whose own text says how much it reads; None: none does."""
        told = ((n, c) for n, c in self.launches.items() if c.bytes_read is not None)
        return next(told, None)

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        keys: dict[str, str] = {}
        for one in self.instructions.values():
            below = [keys.get(name, "") for name in one.operands]
            below = sorted(below) if _is_unordered(one, self) else below
            keys[one.name] = digest((label(one, self.body(one)), *below))
        return keys

    @functools.cached_property
    def _ranks(self) -> dict[str, tuple[str, str]]:
        """The key of each operation, and after it what becomes of its result.

        The second tells apart operands of equal structure that other operations use differently.
        """
        uses: dict[str, list[str]] = {name: [] for name in self.instructions}
        ranks: dict[str, tuple[str, str]] = {}
        for one in reversed(list(self.instructions.values())):
            above = digest(sorted(uses[one.name]))
            ranks[one.name] = self._keys[one.name], above
            ordered = not _is_unordered(one, self)
            for place, name in enumerate(one.operands):
                if name in uses:
                    uses[name].append(
                        digest((label(one, self.body(one)), str(place * ordered), above))
                    )
        return ranks

    @functools.cached_property
    def order(self) -> list[Instruction]:
        """The operations, operands before what uses them."""
        order: list[Instruction] = []
        seen: set[str] = set()
        stack = [(self.root.name, False)]
        while stack:
            name, done = stack.pop()
            if done:
                order.append(self.instructions[name])
            elif name not in seen and name in self.instructions:
                seen.add(name)
                stack.append((name, True))
                one = self.instructions[name]
                names = [n for n in one.operands if n in self.instructions]
                if _is_unordered(one, self):
                    names.sort(key=self._ranks.__getitem__)
                stack += [(n, False) for n in reversed(names)]
        return order

    @functools.cached_property
    def structure(self) -> str:
        """A text of the operations and the edges between them."""
        places = {one.name: i for i, one in enumerate(self.order)}
        lines = []
        for one in self.order:
            at = [places[n] for n in one.operands if n in places]
            at = sorted(at) if _is_unordered(one, self) else at
            lines.append(f"{label(one, self.body(one))}{at}")
        return "\n".join(lines)

    @functools.cached_property
    def demand(self) -> dict[str, float]:
        """Elements of each operation's result that are computed, or read if a parameter's."""
        demand = dict.fromkeys((one.name for one in self.order), 0.0)
        for one in self.outputs:
            demand[one.name] = one.array.elements
        if self.root.name in demand and self.root.opcode != "tuple":
            demand[self.root.name] = self.root.array.elements
        for one in reversed(self.order):
            for place, name in enumerate(one.operands):
                if name in demand:
                    more = demand[name] + self._asks(one, place, demand[one.name])
                    demand[name] = min(more, self.array(name).elements)
        return demand

    def _asks(self, one: Instruction, place: int, elements: float) -> float:
        """Returns the elements of an operand that so many elements of a result need."""
        operand, code = self.array(one.operands[place]), one.opcode
        size, result = operand.elements, max(one.array.elements, 1)
        if code in ("tuple", "get-tuple-element"):
            return size
        if code in ("slice", "dynamic-slice", "gather", "pad", "broadcast"):
            return min(size, elements) if place == 0 else size
        if code == "dynamic-update-slice":
            update = self.array(one.operands[1]).elements
            if place == 0:
                return 0 if one.name in self.in_place else max(elements - update, 0)
            return size
        if code == "scatter" and place == 0 and one.name in self.in_place:
            combines = any(
                work.class_of(i) != "other"
                for i in self.body(one).values()
                if i.opcode not in work.FREE
            )
            return min(size, self.array(one.operands[-1]).elements) if combines else 0
        if size == result:
            return elements
        return size * min(elements / result, 1)

    def written(self, one: Instruction) -> float:
        """Returns the bytes that an output writes."""
        call = self.launches.get(one.name)
        if call is not None and call.bytes_written is not None:
            return call.bytes_written
        if one.name not in self.in_place:
            return sum(array.nbytes for array in one.arrays)
        part = one.operands[1] if one.opcode == "dynamic-update-slice" else one.operands[-1]
        return min(self.array(part).nbytes, one.array.nbytes)


def region(module: Module, one: Instruction, around: Mapping[str, Instruction]) -> Region:
    """Returns the region of an instruction of a computation."""
    if one.opcode in ("fusion", "fusion-start") and one.called:
        inside = {n: as_dot(i) for n, i in module.instructions(one.called[0]).items()}
        root = next((i for i in inside.values() if i.is_root), None)
        if root is not None:
            return Region(inside, root, module)
    parameters = {
        name: dataclasses.replace(around[name], opcode="parameter", arguments="")
        for name in one.operands
        if name in around
    }
    one = as_dot(one)
    return Region({**parameters, one.name: one}, one, module)


def label(one: Instruction, body: Mapping[str, Instruction]) -> str:
    """Returns a text of an operation's opcode, shapes and attributes, without any names."""
    shape = "".join(map(str, one.arrays))
    if one.opcode in ("parameter", "constant"):
        return f"{one.opcode} {shape}"
    attributes = one.attributes.split(", metadata=")[0]
    words = [f"{name}={value}" for name, value in _STRUCTURE.findall(attributes)]
    inner = sorted(i.opcode for i in body.values() if i.opcode not in work.FREE)
    return " ".join((one.opcode, shape, *words, *inner))


def leaves(region: Region) -> list[Any]:
    """Returns the children of the root of a region's tree: a mapping an operation."""
    reads = {one.name: read for one in region.order if (read := bytes_read(region, one))}
    writes = {one.name: region.written(one) for one in region.outputs}
    nodes: list[Any] = []
    for one in region.order:
        if one.opcode in work.FREE:
            continue
        sources = {region.source(n).name for n in one.operands if n in region.instructions}
        leaf = _leaf(region, one)
        leaf["bytes_read"] = sum(reads.pop(name, 0.0) for name in sorted(sources))
        leaf["bytes_written"] = writes.get(one.name, 0.0)
        if region.kernel is not None:
            told, count = region.kernel
            is_kernel = one.name == told
            leaf["bytes_read"] = count.bytes_read if is_kernel else 0.0
            leaf["bytes_written"] = count.bytes_written if is_kernel else 0.0
        nodes.append(leaf)
        inner = [i for i in region.body(one).values() if i.opcode not in work.FREE]
        if len(inner) > 1 or one.opcode == "sort":
            nodes.append(
                [
                    {"opcode": work.class_of(i), "itemsize": i.array.itemsize}
                    for i in sorted(inner, key=lambda i: label(i, {}))
                ]
            )
    return nodes


def bytes_read(region: Region, one: Instruction) -> float:
    """Returns the bytes of a parameter that are read, 0 of other operations."""
    if one.opcode != "parameter":
        return 0.0
    if len(one.arrays) != 1:
        return sum(array.nbytes for array in one.arrays)
    return region.demand[one.name] * one.array.itemsize


def product_of(one: Instruction, operands: Sequence[Array]) -> work.Product | None:
    """Returns the product of a dot or a convolution."""
    if len(operands) > 1 and one.opcode in ("dot", "ragged-dot"):
        return work.dot(one, operands)
    if len(operands) > 1 and one.opcode == "convolution":
        return work.convolution(one, operands[0], operands[1], one.array)[0]
    return None


def _leaf(region: Region, one: Instruction) -> dict[str, Any]:
    operands, kind = region.operands(one), work.class_of(one)
    call = region.launches.get(one.name)
    elements = region.demand[one.name]
    share = elements / max(one.array.elements, 1)
    product = product_of(one, operands)
    if kind == "copy" and operands and operands[0].layout != one.array.layout:
        kind = "transpose"
    width = float(one.array.minor)
    if product is not None:
        width = product.k
    elif kind == "reduce" and operands:
        width = max(operands[0].elements / max(one.array.elements, 1), 1)
    flops = work.flops_of(one, operands, region.body(one), share) if operands else 0.0
    special = elements * (kind in TRANSCENDENTAL)
    if call is not None:
        kind, flops, special, product = call.opcode, call.flops, call.transcendentals, call.product
    shape = {} if product is None else dataclasses.asdict(product)
    return {
        "opcode": kind,
        "flops": flops,
        "transcendentals": special,
        "elements": elements,
        "width": width,
        **shape,
        "indices": work.gathered(one, operands),
        "operands": len(one.operands),
        "itemsize": one.array.itemsize,
    }


def _is_unordered(one: Instruction, region: Region) -> bool:
    """Whether the order of the operands is irrelevant: commuting operations, tuples of results."""
    return one.opcode in work.COMMUTES or (one.opcode == "tuple" and one is region.root)


# ---- program reuse
#
# Computes reuse distances: how many bytes a program touches before it reads an array again.
#
# A cache still holds an array if few bytes were touched since the array was last read or written.
# To count them, the schedule of a module is walked with a clock that counts bytes: each launched
# instruction advances it by the bytes that it reads and writes. The reuse distance of an operand is
# what the clock advanced since the operand was last touched. (CDMPP has this number for loop nests
# as a feature of its leaves, section 4.) A loop is walked for two iterations and the second one
# counts, because the first does not know what the iteration before it touched. An operand of which
# each iteration reads only a slice has at least its own size as its distance, because the other
# parts are read in between.
#
# Not here: the caches of a device.


Key = tuple[str, str]  # a computation and an instruction of it
_WHOLE = 0.9  # (chosen) an instruction that reads less than this share of an operand reads a slice


@dataclasses.dataclass(frozen=True)
class Touched:
    """What one execution touches. read: (operand, bytes, bytes of all of it). written: bytes."""

    read: Sequence[tuple[str, float, float]]
    written: float

    @property
    def nbytes(self) -> float:
        """All together."""
        return sum(nbytes for _, nbytes, _ in self.read) + self.written


@dataclasses.dataclass(frozen=True)
class Reuse:
    """The place of an instruction in its program, as far as caches are concerned (record.PLACE).

    distance: bytes that the program touched since the instruction's operands were last touched, as
    the geometric mean over the bytes that it reads. cold: bytes that it is the first in the call to
    touch; their distance is all that the call touches. around: bytes that one iteration of the
    innermost loop around the instruction touches, or that the call does. turns: iterations of all
    loops around it, multiplied.
    """

    distance: float
    cold: float
    around: float
    turns: float


def reuse(module: Module, touched: Mapping[Key, Touched]) -> dict[Key, Reuse]:
    """Returns the reuse of every launched instruction. touched: by computation and name."""
    walk = _Walk(module, touched)
    walk.computation(module.entry, {}, 1.0)
    total = walk.clock
    reuses = {}
    for key, (logs, cold, around, turns) in walk.reads.items():
        read = sum(nbytes for _, nbytes, _ in touched[key].read)
        mean = (logs + cold * math.log1p(total)) / read if read else math.log1p(total)
        reuses[key] = Reuse(math.exp(mean), cold, walk.around[around], turns)
    return reuses


class _Walk:
    """The walk over a module: its clock, when each value was last touched, and the distances."""

    def __init__(self, module: Module, touched: Mapping[Key, Touched]):
        self.clock = 0.0
        self.reads: dict[Key, tuple[float, float, str, float]] = {}
        self.around: dict[str, float] = {}
        self._module, self._touched = module, touched
        self._last: dict[str, float] = {}
        self._turns = 0

    def computation(
        self, name: str, arguments: Mapping[int, Any], turns: float, loop: str = ""
    ) -> Any:
        """Walks a computation and returns its result: a value's name, or a list of them.

        arguments: values of the parameters, by their number. turns: iterations of all loops around,
        multiplied. loop: the name of the innermost loop's body; "": there is none.
        """
        loop, began = loop or name, self.clock
        values: dict[str, Any] = {}
        result: Any = None
        self._turns += 1
        visit = self._turns  # values of different visits are different
        for one in self._module.instructions(name).values():
            made = f"{visit} {one.name}"
            before = [values.get(operand) for operand in one.operands]
            if one.opcode == "parameter":
                place = int(one.arguments) if one.arguments.isdigit() else 0
                values[one.name] = arguments.get(place, made)
            elif one.opcode == "constant":
                values[one.name] = f"{name} {one.name}"  # the same in every visit
            elif one.opcode == "get-tuple-element":
                index = int(one.get("index", "0") or 0)
                parts = before[0] if before else made
                if isinstance(parts, list):  # of a start: operands and results, not told apart
                    parts = parts[index] if index < len(parts) else made
                values[one.name] = parts
            elif one.opcode == "tuple":
                values[one.name] = before
            elif repeated := self._module.loop(one):
                values[one.name] = self._loop(repeated[0], repeated[1] or 1, before, turns)
            elif one.opcode in ("call", "async-start", "conditional"):
                inner = before[1:] if one.opcode == "conditional" else before
                for place, called in enumerate((*one.called, *one.branches)):
                    own_given = (
                        {0: inner[place]}
                        if one.branches and place < len(inner)
                        else (dict(enumerate(inner)))
                    )
                    values[one.name] = self.computation(called, own_given, turns, loop)
            elif one.opcode in work.FREE or one.opcode.endswith("-done"):
                values[one.name] = before[0] if before else made
            else:
                values[one.name] = self._launch((name, one.name), one, made, values, turns, loop)
            if one.is_root:
                result = values[one.name]
        if loop == name:
            self.around[name] = self.clock - began
        return result

    def _loop(self, body: str, trips: int, before: Sequence[Any], turns: float) -> Any:
        state, began = before[0] if before else None, self.clock
        for _ in range(min(trips, 2)):
            began = self.clock
            state = self.computation(body, {0: state}, turns * trips)
        if trips > 2:
            # The iterations that were not walked only advance the clock: what the second iteration
            # touched was touched by the last one, too.
            more = (trips - 2) * (self.clock - began)
            for value, when in self._last.items():
                if when > began:
                    self._last[value] = when + more
            self.clock += more
        return state

    def _launch(
        self,
        key: Key,
        one: Instruction,
        result: str,
        values: Mapping[str, Any],
        turns: float,
        loop: str,
    ) -> Any:
        touched = self._touched.get(key)
        made = result if len(one.arrays) < 2 else [f"{result} {i}" for i in range(len(one.arrays))]
        if touched is None:
            return made
        logs, cold, seen = 0.0, 0.0, []
        for operand, nbytes, size in touched.read:
            names = list(_leaves(values.get(operand)))
            known = [self._last[value] for value in names if value in self._last]
            seen += names
            if not known:
                cold += nbytes
                continue
            away = self.clock - max(known)
            if turns > 1 and nbytes < _WHOLE * size:
                away = max(away, size)
            logs += nbytes * math.log1p(away)
        self.reads[key] = logs, cold, loop, turns
        self.clock += touched.nbytes
        for value in (*seen, *_leaves(made)):
            self._last[value] = self.clock
        return made


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    elif value is not None:
        yield value


# ---- program loops
#
# Finds in which order a launched instruction reads the arrays in memory.
#
# XLA's code for an operation is a nest of loops over its result, the result's adjacent elements
# innermost; a reduction has loops over the reduced dimensions inside of these. What an operation
# inside a fusion reads follows from the loops of its result: a transposition or a copy into another
# layout permutes them, a broadcast drops some. So each array in memory is read by a nest of loops
# with known strides, and these say how many adjacent elements are read before the address jumps.
#
# A nest is a list of (stride, count), innermost first. The stride is in elements of the value's own
# layout; it is 0 where the loop does not move region the value.


Nest = tuple[tuple[int, int], ...]
# Operations whose result is not computed from the same place of their operands.
_STOPS = ("dot", "ragged-dot", "convolution", "custom-call", "scatter", "iota", "constant", "rng",
          "rng-bit-generator", "tuple")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Read:
    """How an array in memory is read, or updated in place.

    reads: elements. run: bytes that are read side by side before the address jumps. stride: bytes
    between the starts of two runs; 0 if the address never jumps.
    """

    reads: float
    run: float
    stride: float
    itemsize: float

    @property
    def jumps(self) -> float:
        """How often the address jumps."""
        return self.reads * self.itemsize / self.run if self.stride else 0.0


def reads(region: Region, by_library: bool = False) -> list[Read]:
    """Returns how the operations of a region read their parameters, a value a path and nest.

    Args: by_library: a library runs the region. Its reductions are assumed to read their operand in
      the order of memory, whatever dimensions they add up: YNNPACK's sums over columns take 0.29 ns
      an element on an AMD EPYC, XLA's own loops 4.2 ns.
    """
    stack = [(one.name, _nest(one)) for one in region.outputs]
    seen: set[tuple[str, Nest]] = set()
    result: list[Read] = []
    while stack:
        name, nest = stack.pop()
        if (name, nest) in seen or name not in region.instructions:
            continue
        seen.add((name, nest))
        one = region.instructions[name]
        if one.opcode == "parameter":
            if one.array.elements > 1 and len(one.arrays) == 1:
                result.append(_read(one.array, nest))
            continue
        if one.name in region.in_place and one.opcode == "dynamic-update-slice":
            moved = _by_dimension(nest, region.array(one.operands[1]))
            result.append(_read(one.array, _onto(one.array, moved)))
            stack.append((one.operands[1], nest))
            continue
        if by_library and one.opcode == "reduce":
            stack += [
                (n, _nest(region.instructions[n])) for n in one.operands if n in region.instructions
            ]
            continue
        stack += _below(region, one, nest)
    return result


def _nest(one: Instruction) -> Nest:
    """Returns the loops over the result of an operation that writes memory."""
    array = one.array
    order = list(array.layout)
    if one.opcode == "sort":  # one row after the other
        order.sort(key=lambda d: d not in one.dims("dimensions"))
    return _onto(array, [(d, 1, array.dims[d]) for d in order])


def _below(region: Region, one: Instruction, nest: Nest) -> Iterator[tuple[str, Nest]]:
    """Yields the operands of an operation with the loops that read them."""
    if one.opcode in _STOPS or not one.operands:
        return
    if one.opcode in (*PASS, "reshape"):
        yield one.operands[0], nest
        return
    value = one.array
    moves = _by_dimension(nest, value)
    if one.opcode in ("reduce", "reduce-window"):
        for name in one.operands[: len(one.operands) // 2]:
            if name in region.instructions:
                yield name, _combined(one, region.array(name), moves)
        return
    for place, name in enumerate(one.operands):
        if name not in region.instructions or region.array(name).elements <= 1:
            continue
        array = region.array(name)
        if one.opcode == "transpose":
            to = one.dims("dimensions")
        elif one.opcode == "broadcast":
            at = one.dims("dimensions")
            to = [at.index(d) if d in at else -1 for d in range(len(value.dims))]
        elif one.opcode == "gather":
            if place:
                continue
            to = _gathered(one, array, len(value.dims))
        elif len(array.dims) == len(value.dims):
            to = list(range(len(value.dims)))
        else:
            continue
        by = _steps(one, array, to)
        there = [(to[d], s * by[d], n) if d >= 0 else (-1, 0, n) for d, s, n in moves]
        if one.opcode in ("concatenate", "pad"):  # an operand makes a part of the result
            there = [(d, s, min(n, array.dims[d]) if d >= 0 else n) for d, s, n in there]
        yield name, _onto(array, there)


def _combined(one: Instruction, source: Array, moves: list[tuple[int, int, int]]) -> Nest:
    """Returns the loops of a reduction over its operand: those of the result around its own."""
    if one.opcode == "reduce":
        gone = one.dims("dimensions")
        remaining = [d for d in range(len(source.dims)) if d not in gone]
        inner = [(d, 1, source.dims[d]) for d in source.layout if d in gone]
        outer = [(remaining[d], step, n) for d, step, n in moves if 0 <= d < len(remaining)]
    else:
        sizes = work.windows(one)
        inner = [(d, sizes[d].dilation, sizes[d].size) for d in source.layout]
        outer = [(d, step * sizes[d].stride, n) for d, step, n in moves if d >= 0]
    return _onto(source, inner + outer)


def _gathered(one: Instruction, array: Array, rank: int) -> list[int]:
    """Returns the dimension of the operand that each dimension of a gather's result moves along."""
    inside = one.dims("offset_dims")
    gone = [*one.dims("collapsed_slice_dims"), *one.dims("operand_batching_dims")]
    remaining = [d for d in range(len(array.dims)) if d not in gone]
    looked_up = (one.dims("start_index_map") or [-1])[0]
    to = dict(zip(inside, remaining, strict=False))
    return [to.get(d, looked_up) for d in range(rank)]


def _steps(one: Instruction, array: Array, to: list[int]) -> list[int]:
    """Returns how far one step along each dimension of the result moves along the operand's `to`.

    A slice may have steps. The next row that a gather looks up is anywhere, assumed to be a third
    of the dimension away, the mean distance of two random rows.
    """
    steps = [1] * len(to)
    if one.opcode == "slice":
        for d, part in enumerate(re.findall(r"\[([\d:]+)\]", one.get("slice"))):
            bounds = part.split(":")
            if d < len(to) and len(bounds) == 3:
                steps[d] = int(bounds[2])
    if one.opcode == "gather":
        inside = one.dims("offset_dims")
        for d, there in enumerate(to):
            if d not in inside and there >= 0:
                steps[d] = max(array.dims[there] // 3, 2)
    return steps


def _by_dimension(nest: Nest, array: Array) -> list[tuple[int, int, int]]:
    """Returns the loops as (dimension, step, count), innermost first; dimension -1: none."""
    loops: list[tuple[int, int, int]] = []
    for stride, count in nest:
        if stride == 0:
            loops.append((-1, 0, count))
            continue
        for d, below in array.strides.items():
            above = below * array.dims[d]
            if below <= stride < above and count > 1:
                step = max(stride // below, 1)
                room = math.ceil(array.dims[d] / step)
                loops.append((d, step, min(count, room)))
                count, stride = math.ceil(count / room), above
    return loops


def _onto(array: Array, moves: list[tuple[int, int, int]]) -> Nest:
    """Returns the loops, given by dimensions of an array, as strides in its layout."""
    strides = {d: stride for d, stride in array.strides.items() if array.dims[d] > 1}
    return tuple((strides.get(d, 0) * step, n) for d, step, n in moves if n > 1)


def _read(array: Array, nest: Nest) -> Read:
    moving = [(stride, count) for stride, count in nest if stride and count > 1]
    reads = math.prod(count for _, count in moving)
    run = 1
    for stride, count in moving:
        if stride != run:
            return Read(reads, run * array.itemsize, stride * array.itemsize, array.itemsize)
        run *= count
    return Read(reads, run * array.itemsize, 0.0, array.itemsize)


# ---- program access
#
# Finds how an operation walks through memory, and what kind of code runs it.
#
# An operation that reads an array against its layout (a transposition, a product with a transposed
# operand) jumps by a stride from element to element. If a large power of two divides the stride,
# the elements compete for a few sets of the cache: on an AMD EPYC, a transposition of 384 x 1,024
# floats takes 5.5 times as long as one of 384 x 1,040.
#
# Strides are in bytes. All of it follows from the shapes, layouts and attributes of an instruction.


_PARTS = re.compile(r'"outer_dimension_partitions":(\[[^\]]*\])')
_THREADED = ("dot", "convolution", "sort", "custom-call")  # use the threads of a CPU as they like


def access(region: Region, one: Instruction, *, is_gpu: bool = False) -> dict[str, float]:
    """Returns the features of record.FEATURES that say how a launched instruction is executed.

    They are those of `strides`, and: 'span', the bytes of the whole arrays that it reads at least a
    part of; 'dilated', the product of a convolution's dilations; 'custom', 1 if it is a custom call
    or fusion, whose code is a library's (YNNPACK, cuBLAS) or another compiler's (Triton), and not
    that of XLA's own loops; 'parts', how many threads of a CPU a loop of XLA's own runs on at most.
    Other code divides itself among all threads, or runs on a GPU: then 'parts' is 0.

    Args: region: of `one`. is_gpu: whether it runs on a GPU.
    """
    parameters = [i for i in region.order if i.opcode == "parameter" and region.demand[i.name]]
    windows = [d for i in region.order if i.opcode == "convolution" for d in work.windows(i)]
    is_custom = one.opcode == "custom-call" or one.get("kind") == "kCustom"
    is_loop = not (is_gpu or is_custom or one.opcode in _THREADED)
    cuts = _PARTS.search(one.attributes)
    parts = math.prod(map(int, json.loads(cuts[1]))) if cuts else 1
    return {
        **strides(region, is_custom),
        "span": sum(array.nbytes for i in parameters for array in i.arrays),
        "dilated": math.prod(d.base * d.dilation for d in windows) if windows else 0.0,
        "custom": float(is_custom),
        "parts": float(parts) if is_loop else 0.0,
    }


def strides(region: Region, by_library: bool = False) -> dict[str, float]:
    """Returns the features 'stride', 'stride_right', 'run' and 'jumps' of record.FEATURES.

    Of a product, 'stride' lies between the elements of the first operand along the contracted
    dimension, and 'stride_right' between those of the second operand along the result's rows, each
    if the operand is read against its layout. Otherwise 'jumps' says how often the address jumps
    while arrays are read, and 'run' and 'stride', both in bytes, belong to the array with the most
    jumps (`Read`). Each is 0 where there is none. by_library: as `reads` has it.
    """
    dots = [i for i in region.order if i.opcode in ("dot", "ragged-dot") and len(i.operands) > 1]
    if dots:
        one = max(dots, key=lambda i: (i.array.elements, i.shape))
        left, right = region.operands(one)[:2]
        summed = one.dims("lhs_contracting_dims")
        others = {*one.dims("rhs_contracting_dims"), *one.dims("rhs_batch_dims")}
        columns = [d for d in range(len(right.dims)) if d not in others]
        return {"stride": _against(left, summed), "stride_right": _against(right, columns)}
    jumping = [read for read in reads(region, by_library) if read.jumps]
    if not jumping:
        return {}
    most = max(jumping, key=lambda read: (read.jumps, read.stride, read.run))
    jumps = math.fsum(read.jumps for read in jumping)  # the same in any order
    return {"stride": most.stride, "run": most.run, "jumps": jumps}


def _against(array: Array, dims: Sequence[int]) -> float:
    """Returns the least stride along some dimensions, 0 where they hold adjacent elements."""
    order = [d for d in array.layout if array.dims[d] > 1]
    if not order or order[0] in dims:
        return 0.0
    return next((array.itemsize * array.strides[d] for d in order if d in dims), 0.0)
