"""Turns a compiled program into records of what a device launches (after CDMPP, arXiv 2311.09690).

`records` reads the scheduled XLA module of a `jax.stages.Compiled`, which may be compiled for a CPU
or for a GPU that is not there (pallas_kernels/aot.py). It counts by these rules:

- A record is one launched instruction: a fusion, a product, a call of a library or kernel, a copy
  or a collective. Tuples, parameters, constants, bitcasts and the `-done` halves of asynchronous
  operations launch nothing. The instructions in the body of a loop have records whose `executions`
  are the trip count; the loop itself and its condition have none.
- Of a conditional only one branch counts: the one that a constant chooses, else the one with the
  most FLOPs (then bytes), because the text does not say how often each is taken.
- If the compiler does not know the trip count of a loop, the count is in the loop's scope, for
  example "at_most_3_turns" (cost/hlo.py). A loop without such a scope counts once, with a
  warning.
- FLOPs: a product has 2 M N K, a sum of n elements n - 1, other arithmetic on floats one for each
  element of the result. The padding of a convolution is not multiplied. Comparisons, selections,
  conversions and integers have no FLOPs; transcendental functions are a feature of their own.
  Collectives have none.
- Bytes: what the launched instruction reads of its operands and writes of its results; what stays
  inside a fusion has none. If an operand is only sliced, the slices count; if an array is updated
  in place, the updated part.
- How long ago the operands were touched (cost/program_body.py) has no part in a record's hash.

Not here: times (systems/cdmpp), the mesh axes of a collective (cost/hlo.py).
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from megajax.cost import program_body as body
from megajax.cost import program_work as work
from megajax.cost.hlo import Instruction, Module, device_groups
from megajax.cost.program_body import Touched, access, reuse
from megajax.cost.record import SIZES, OpRecord, record

Platform = Literal["cpu", "gpu"]
Key = tuple[str, str]  # a computation and an instruction of it
_MOVES = frozenset(
    ("copy", "slice", "update", "reshape", "transpose", "concatenate", "broadcast", "convert")
)
# {class of an operation: kind of record}, the most expensive first. The kind of a fusion is that of
# the first entry that is among its large operations (`_kind`).
_KINDS = {
    "collective": "collective",
    "sort": "sort",
    "scatter": "scatter",
    "reduce": "reduction",
    "gather": "gather",
    "random": "random",
    "custom": "custom",
    "other": "custom",
}
_PRODUCTS = ("dot", "convolution", "attention")
_TOTALS = ("flops", "bytes_read", "bytes_written", "transcendentals", "indices")


def records(
    compiled: Any,
    *,
    live_rows: float = 1.0,
    live_pairs: float = 1.0,
    platform: Platform | None = None,
) -> list[OpRecord]:
    """Returns what one device launches in one call of a program, in the order of the schedule.

    Args:
      compiled: a `jax.stages.Compiled`, or the text of its module.
      live_rows: share of the rows of a grouped product that are in groups. It is used for loops
        over such rows, which have no trip count of their own.
      live_pairs: of the pairs of a query and a key that the causal mask and the window leave, the
        share that a fused attention computes: 1/n if a row is packed with n equal segments.
      platform: where the program runs; None: as `compiled` says, 'cpu' for a text. On a GPU a
        product of float32 at default precision is one of tfloat32.

    Warns of operations whose FLOPs are unknown and of loops whose trip count is unknown.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    where = platform or ("cpu" if isinstance(compiled, str) else _platform(compiled))
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
    replicas = re.search(r"^HloModule .*\breplica_count=(\d+)", text)
    devices = (int(partitions[1]) if partitions else 1) * (int(replicas[1]) if replicas else 1)
    module = Module(text, live_rows)
    reader = _Reader(module, where == "gpu", devices, live_pairs)
    launched = list(reader.computation(module.entry, 1.0))
    known = reuse(module, reader.touched)
    return [
        one if key not in known else one.within(**dataclasses.asdict(known[key]))
        for key, one in launched
    ]


def _platform(compiled: Any) -> Platform:
    """Returns where a program runs; the shardings of its results know the devices."""
    import jax

    for sharding in jax.tree.leaves((compiled.output_shardings, compiled.input_shardings)):
        for device in sharding.device_set:
            return "cpu" if device.platform == "cpu" else "gpu"
    return "cpu"


class _Reader:
    """Walks the computations of a module."""

    def __init__(self, module: Module, is_gpu: bool, devices: int, live_pairs: float = 1.0):
        self._module, self._is_gpu, self._devices = module, is_gpu, devices
        self._live_pairs = live_pairs
        self.touched: dict[Key, Touched] = {}

    def computation(self, name: str, executions: float) -> Iterator[tuple[Key, OpRecord]]:
        """Yields the records of a computation that runs so often, with their places."""
        around = self._module.instructions(name)
        for one in around.values():
            if one.opcode in work.FREE or one.opcode.endswith("-done"):
                continue
            if loop := self._module.loop(one):
                yield from self.computation(loop[0], executions * self._trips(one, *loop))
            elif one.opcode == "conditional":
                yield from self._branch(one, around, executions)
            elif one.opcode in ("call", "async-start"):
                for called in one.called:
                    yield from self.computation(called, executions)
            elif (launched := self._launched(one, around, executions)) is not None:
                self.touched[name, one.name] = self._touched(one, around)
                yield (name, one.name), launched

    def _trips(self, one: Instruction, loop: str, trips: int | None) -> int:
        if trips is None:
            where = f" of {one.op_name}" if one.op_name else ""
            warnings.warn(
                f"the program does not say how often the loop {loop}{where} runs: it counts once",
                stacklevel=2,
            )
        return 1 if trips is None else trips

    def _branch(
        self, one: Instruction, around: Mapping[str, Instruction], executions: float
    ) -> list[tuple[Key, OpRecord]]:
        branches = one.branches
        if (index := _constant(one.operands[0], around)) is not None:
            branches = [branches[index] if 0 <= index < len(branches) else branches[-1]]
        priced = [list(self.computation(name, executions)) for name in branches]

        def work_of(branch: list[tuple[Key, OpRecord]]) -> tuple[float, float]:
            flops = sum(r.flops * r.executions for _, r in branch)
            return flops, sum(r.nbytes * r.executions for _, r in branch)

        return max(priced, key=work_of, default=[])

    def _launched(
        self, one: Instruction, around: Mapping[str, Instruction], executions: float
    ) -> OpRecord | None:
        if one.opcode.removesuffix("-start") in work.COLLECTIVES:
            return self._collective(one, around, executions)
        if one.opcode == "custom-call" and body.target(one) in body.MARKERS:
            return None
        if one.opcode == "copy-start":
            # The start of an asynchronous copy as the copy that it is.
            shape = re.match(r"\((\w+\[[\d,]*\](?:\{[^}]*\})?)", one.shape)
            one = dataclasses.replace(one, opcode="copy", shape=shape[1] if shape else one.shape)
        return self._region(body.region(self._module, one, around), one, executions)

    def _touched(self, one: Instruction, around: Mapping[str, Instruction]) -> Touched:
        """Returns what an instruction reads of each operand and writes."""
        names = [name for name in one.operands if name in around]
        sizes = [sum(a.nbytes for a in around[name].arrays) for name in names]
        if one.opcode.removesuffix("-start") in work.COLLECTIVES:
            return Touched(list(zip(names, sizes, sizes, strict=True)), one.array.nbytes)
        region = body.region(self._module, one, around)
        read = dict.fromkeys(names, 0.0)
        for inner in region.order:
            name = inner.name
            if inner.opcode == "parameter" and inner.arguments.isdigit():
                name = one.operands[int(inner.arguments)]
            if inner.opcode == "parameter" and name in read:
                read[name] += body.bytes_read(region, inner)
        written = sum(region.written(result) for result in region.outputs)
        return Touched([(n, read[n], w) for n, w in zip(names, sizes, strict=True)], written)

    def _collective(
        self, one: Instruction, around: Mapping[str, Instruction], executions: float
    ) -> OpRecord:
        read_arrays = [a for n in one.operands if n in around for a in around[n].arrays]
        made = [a for a in one.received if a.dtype != "token"]
        groups = device_groups(one.attributes, self._devices)
        ranks = len(groups[0]) if one.opcode != "collective-permute" else 2
        array = max(made or read_arrays, key=lambda a: a.nbytes, default=one.array)
        read, written = (sum(a.nbytes for a in arrays) for arrays in (read_arrays, made))
        leaf = {
            "opcode": "collective",
            "bytes_read": read,
            "bytes_written": written,
            "elements": array.elements,
            "width": ranks,
            "operands": len(read_arrays),
            "itemsize": array.itemsize,
        }
        values = {
            "bytes_read": read,
            "bytes_written": written,
            "elements": array.elements,
            "rows": array.elements,
            "width": ranks,
            "operands": len(read_arrays),
            "itemsize": array.itemsize,
        }
        return record(
            "collective",
            [leaf],
            values,
            dtype=work.dtype_of(array),
            executions=executions,
            name=one.name,
            structure=f"{one.opcode.removesuffix('-start')} {made}",
        )

    def _region(self, region: body.Region, one: Instruction, executions: float) -> OpRecord:
        leaves = body.leaves(region)
        flat = [leaf for leaf in leaves if isinstance(leaf, dict)]
        fused = [leaf for leaf in flat if leaf["opcode"] == "attention"]
        for leaf in fused:
            leaf["flops"] *= self._live_pairs
            leaf["transcendentals"] *= self._live_pairs
        structure = region.structure
        if fused and self._live_pairs != 1:
            structure += f" {self._live_pairs:g} of the pairs"
        kind, values = _features(region, flat)
        values |= access(region, one, is_gpu=self._is_gpu)
        if kind == "custom":
            for name in sorted(
                {i.opcode for i in region.order if work.class_of(i) == "other"} - work.FREE
            ):
                body.unknown(f"the operation {name}")
        dtype = self._dtype(region)
        values["itemsize"] = SIZES[dtype]
        return record(
            kind,
            leaves,
            values,
            dtype=dtype,
            executions=executions,
            name=one.name,
            structure=structure,
        )

    def _dtype(self, region: body.Region) -> str:
        """Returns the data type of the arithmetic that bounds a region."""
        products = [i for i in region.order if i.opcode in ("dot", "ragged-dot", "convolution")]
        if products:
            one = max(products, key=lambda i: i.array.elements)
            wide = max(region.operands(one)[:2], key=lambda a: a.itemsize, default=one.array)
            return self._multiplied(one, work.dtype_of(wide))
        for name, call in region.launches.items():
            one = region.instructions[name]
            floats_read = [a for a in region.operands(one) if a.is_float]
            # Scales, slopes and rotations stand beside the arrays that are multiplied.
            by = call.product
            left = [a for a in floats_read if by and a.elements == by.batch * by.m * by.k]
            largest = max(floats_read, key=lambda a: a.elements, default=region.root.array)
            dtype = work.dtype_of(left[0] if left else largest)
            return self._multiplied(one, dtype) if call.opcode == "convolution" else dtype
        floats = [i.array for i in region.order if i.opcode not in work.FREE and i.array.is_float]
        return work.dtype_of(max(floats or [region.root.array], key=lambda a: a.itemsize))

    def _multiplied(self, one: Instruction, dtype: str) -> str:
        """Returns the type that a library multiplies in: GPUs take tfloat32 for float32.

        They do not if the program asks for the highest precision.
        """
        exact = re.search(r"operand_precision=\{[^}]*highest|algorithm=\w*f32_f32", one.attributes)
        return "tfloat32" if self._is_gpu and dtype == "float32" and not exact else dtype


def _features(region: body.Region, leaves: list[dict[str, Any]]) -> tuple[str, dict[str, float]]:
    """Returns (kind, features by name) of a region with these operations."""
    values = {name: float(sum(leaf.get(name, 0) for leaf in leaves)) for name in _TOTALS}
    # A parameter that no operation uses (a result that is an operand) is read all the same.
    if region.kernel is None:
        values["bytes_read"] = sum(body.bytes_read(region, one) for one in region.order)
        values["bytes_written"] = sum(region.written(one) for one in region.outputs)
    result = max((one.array for one in region.outputs), key=lambda array: array.elements)
    values["elements"] = result.elements
    values["width"] = result.minor
    values["rows"] = result.elements / max(result.minor, 1)
    external = [i for i in region.order if i.opcode == "parameter" and i.array.elements > 1]
    values["operands"] = len(external)
    opcodes = {leaf["opcode"] for leaf in leaves}
    values["transposed"] = float("transpose" in opcodes)
    reduces = [leaf for leaf in leaves if leaf["opcode"] == "reduce"]
    if reduces:
        widest = max(reduces, key=lambda leaf: leaf["elements"] * leaf["width"])
        values["reduced"] = float(sum(leaf["elements"] * leaf["width"] for leaf in reduces))
        values["rows"], values["width"] = widest["elements"], widest["width"]
        values["reduces_minor"] = float(any(_reduces_minor(region, i) for i in region.order))
    sorts = [i for i in region.order if i.opcode == "sort"]
    if sorts:
        array = max((i.array for i in sorts), key=lambda array: array.elements)
        length = math.prod(array.dims[d] for d in sorts[0].dims("dimensions"))
        values["rows"], values["width"] = array.elements / max(length, 1), length
    products = [leaf for leaf in leaves if leaf["opcode"] in _PRODUCTS and leaf.get("m")]
    if not products:
        if region.launches:
            return next(iter(region.launches.values())).kind, values
        return _kind(leaves, opcodes), values
    main = max(products, key=lambda leaf: leaf["flops"])
    values |= {name: main[name] for name in ("batch", "m", "n", "k", "transposed")}
    if not reduces:
        values["rows"], values["width"] = main["batch"] * main["m"], main["n"]
    if main["opcode"] != "dot":
        return main["opcode"], values
    return ("product" if main["batch"] == 1 else "batched_product"), values


def _kind(leaves: list[dict[str, Any]], opcodes: set[str]) -> str:
    """Returns the kind of a region without products, which its large operations decide.

    An operation is large if it works on at least a quarter as many elements as the largest one.
    So the sum of a few sizes does not make the selection of many values a reduction.
    """
    if opcodes <= _MOVES - {"convert"}:
        return "copy"

    def size(leaf: dict[str, Any]) -> float:
        return leaf["elements"] * (leaf["width"] if leaf["opcode"] == "reduce" else 1)

    most = max((size(leaf) for leaf in leaves), default=0)
    large = {leaf["opcode"] for leaf in leaves if 4 * size(leaf) >= most}
    return next((kind for code, kind in _KINDS.items() if code in large), "fusion")


def _reduces_minor(region: body.Region, one: Instruction) -> bool:
    operands = region.operands(one)
    if not operands or not operands[0].layout:
        return False
    minor = operands[0].layout[0]
    if one.opcode == "reduce":
        return minor in one.dims("dimensions")
    return one.opcode == "reduce-window" and work.windows(one)[minor].size > 1


def _constant(name: str, around: Mapping[str, Instruction]) -> int | None:
    """Returns the number of a constant behind copies and conversions, 0 and 1 of a boolean."""
    one = around.get(name)
    while one is not None and one.opcode in ("copy", "bitcast", "convert", "reshape"):
        one = around.get(one.operands[0]) if one.operands else None
    if one is None or one.opcode != "constant":
        return None
    text = one.arguments.strip().strip("{}").strip()
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None
