"""Finds the collectives of a compiled module: over which mesh axes they run, and how often.

It reads the scheduled HLO text that XLA prints. Only the text of a GPU target shows the real
communication (that of the CPU backend has no reduce-scatter), so inspect programs that were
compiled for H100s without a device (pallas_kernels/aot.py). An instruction's op_name says
which part of the model asked for it: it contains the named scopes of the model ('blocks', 'head')
and 'transpose' for the backward pass. How often a collective runs is the product of the trip counts
of the loops around it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from megajax.core.axes import ZERO_AXES
from megajax.cost.memory import size

# ---- hlo text
#
# Parses one line of a compiled module's text: an instruction's shapes, opcode and operands.
#
# Only this section knows the syntax of an instruction in XLA's text. `Module` below splits the text
# into computations, which are lists of such lines. In these, `collectives` finds the collectives,
# and cost/program.py everything that a device launches.


BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "s8": 1, "u8": 1, "f8e4m3": 1, "f8e4m3fn": 1,
    "f8e5m2": 1, "f8e4m3fnuz": 1, "f8e5m2fnuz": 1, "f8e8m0fnu": 1, "s16": 2, "u16": 2, "f16": 2,
    "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
    "token": 0, "opaque": 0,
}  # fmt: skip
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_LAYOUT = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([\d,]*)[^}]*\})?")
_BRACKET = re.compile(r"[()]")
_OPERAND = re.compile(r"%([\w.\-]+)")


def ints(text: str) -> list[int]:
    """Returns the numbers of '4,2,8'."""
    return [int(i) for i in text.split(",") if i]


def nbytes(array: tuple[str, str]) -> int:
    """Returns the bytes of one (dtype, dims) that ARRAY found."""
    dtype, dims = array
    return math.ceil(BYTES.get(dtype, 4) * math.prod(ints(dims)))


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    layout: the order of dimensions in memory, first the one whose elements are adjacent.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: tuple[int, ...]

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.dims)

    @property
    def itemsize(self) -> float:
        """Bytes of an element."""
        return BYTES.get(self.dtype, 4)

    @property
    def nbytes(self) -> float:
        """Bytes in memory, without padding."""
        return self.itemsize * self.elements

    @functools.cached_property
    def strides(self) -> dict[int, int]:
        """Elements between two neighbours along each dimension, in the order of `layout`."""
        strides, below = {}, 1
        for dimension in self.layout:
            strides[dimension] = below
            below *= self.dims[dimension]
        return strides

    @property
    def minor(self) -> int:
        """Size of the dimension whose elements lie side by side; of a scalar 1."""
        return self.dims[self.layout[0]] if self.layout else 1

    @property
    def is_float(self) -> bool:
        """Whether arithmetic on it is floating-point arithmetic."""
        return self.dtype[0] == "f" or self.dtype[:2] == "bf" or self.dtype[0] == "c"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.dims)}{list(self.layout)}"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, as its line says it.

    shape: the text of the result's shape. arguments: the text between the brackets that follow the
    opcode. attributes: the text after these brackets.
    """

    name: str
    opcode: str
    shape: str
    arguments: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The result's arrays; of a tuple all, nested ones in their order."""
        return tuple(_array(*fields) for fields in _LAYOUT.findall(self.shape))

    @property
    def array(self) -> Array:
        """The result, or the first array of a tuple."""
        return self.arrays[0] if self.arrays else Array("token", (), ())

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        if "%" in self.arguments or not self.arguments:
            return tuple(_OPERAND.findall(self.arguments))
        # Before optimisation XLA writes names alone.
        return tuple(word.split()[-1] for word in self.arguments.split(", ") if word.strip())

    def get(self, name: str, default: str = "") -> str:
        """Returns the text of an attribute without its outer braces, 'calls' without its %."""
        match = _attribute(name).search(self.attributes)
        if match is None:
            return default
        return match[1] if match[1] is not None else match[2].lstrip("%")

    def dims(self, name: str) -> list[int]:
        """Returns the numbers of an attribute such as dimensions={0,2}."""
        return ints(self.get(name))

    @property
    def op_name(self) -> str:
        """The name that JAX gave the operation: its named scopes and its primitive."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations of a fusion, call, or async start."""
        return re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", self.attributes)

    @property
    def trips(self) -> int | None:
        """How often a while runs its body, or None if the compiler does not know."""
        match = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(match[1]) if match else None

    @property
    def received(self) -> tuple[Array, ...]:
        """The results of a collective; its -start has the operands before them."""
        half = len(self.arrays) // 2 if self.opcode.endswith("-start") else 0
        return self.arrays[half:]

    @property
    def branches(self) -> list[str]:
        """Names of a conditional's computations, in the order of the index that chooses one.

        If a boolean chooses, the computation for false comes first.
        """
        if several := self.get("branch_computations"):
            return re.findall(r"%?([\w.\-]+)", several)
        both = self.get("false_computation"), self.get("true_computation")
        return [name for name in both if name]


@functools.cache
def _attribute(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|[ ,]){name}=(?:\{{([^{{}}]*)\}}|([^\s,]+))")


@functools.lru_cache(maxsize=4096)
def _array(dtype: str, dims: str, layout: str) -> Array:
    sizes = tuple(ints(dims.replace("<=", "").replace(" ", "")))
    order = tuple(ints(layout)) if layout else tuple(reversed(range(len(sizes))))
    return Array(dtype, sizes, order if len(order) == len(sizes) else ())


def parse(line: str) -> Instruction | None:
    """Returns the instruction of a line, or None if there is none."""
    match = NAME.match(line)
    if match is None:
        return None
    start = match.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    bracket = line.find("(", end)
    if end <= 0 or bracket < 0:
        return None
    close = _closing(line, bracket)
    return Instruction(
        match[1],
        line[end:bracket].strip(),
        line[start:end],
        line[bracket + 1 : close],
        line[close + 1 :],
        line.lstrip().startswith("ROOT "),
    )


def instructions(lines: Sequence[str]) -> dict[str, Instruction]:
    """Returns the instructions of a computation's lines by name, in their order."""
    parsed = (parse(line) for line in lines)
    return {one.name: one for one in parsed if one is not None}


def _closing(line: str, start: int) -> int:
    """Returns the place of the bracket that closes the one at `start`, or the line's end."""
    depth = 0
    for match in _BRACKET.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)


# ---- hlo module
#
# Reads a compiled module's text as computations: what runs, how often, and its matmul FLOPs.
#
# The text of a scheduled module lists computations (the entry, bodies of loops, fusions). The lines
# of a computation are instructions, in the order in which the device starts them. `Module` follows
# calls and loops with their trip counts, and counts the FLOPs of matrix products.


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$")
CALLS = ("fusion", "fusion-start", "call", "conditional", "async-start")
# The line of a Mosaic GPU kernel of pallas_kernels/grouped: the shapes of its results and operands,
# and which of the two grouped products it is.
_GROUPED = re.compile(
    r"= (.*?) custom-call\(.*operand_layout_constraints=\{(.*?)\}, api_version.*"
    r'op_name="[^"]*/grouped_(matmul|weights)/'
)
# The trip count of some loops depends on values. The library puts these loops into a named scope
# that contains a number: for the loop of a grouped product, the iterations if groups hold all rows;
# for other loops, the largest number of iterations.
_STEPS = re.compile(r'op_name="[^"]*/grouped_steps_(\d+)/')
_MOST = re.compile(r'op_name="[^"]*\bat_most_(\d+)_turns\b')


@dataclasses.dataclass(frozen=True)
class Place:
    """A line that runs: its computation, its index there, and the loops around it.

    loops: trip counts, outermost first. bodies: the names of the loops' bodies.
    """

    computation: str
    lines: Sequence[str]
    index: int
    loops: tuple[int, ...]
    bodies: tuple[str, ...]

    @property
    def line(self) -> str:
        """The instruction."""
        return self.lines[self.index]

    def until_done(self) -> Sequence[str]:
        """Returns the lines between this start and its done."""
        if (match := NAME.match(self.line)) is None:
            return ()
        done = re.compile(rf"-done\([^)]*%?{re.escape(match[1])}[,)]")
        later = self.lines[self.index + 1 :]
        return next((later[:k] for k, line in enumerate(later) if done.search(line)), ())


class Module:
    """The computations of one module's text."""

    def __init__(self, text: str, live_rows: float = 1.0):
        """Splits the text (`compiled.as_text()`).

        live_rows: share of a grouped product's rows that are in groups, which no program says.
        """
        self._live_rows = live_rows
        self.entry = current = ""
        self.computations: dict[str, list[str]] = {}
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = match[2]
                self.computations[current] = []
                self.entry = current if match[1] else self.entry
            elif current:
                self.computations[current].append(line)
        lines = self.computations
        # Of a computation by its name: its matmul FLOPs, and its instructions by their names.
        self.flops_of: Callable[[str], int] = functools.cache(
            lambda name: self.flops(lines.get(name, []), name)
        )
        self.instructions: Callable[[str], dict[str, Instruction]] = functools.cache(
            lambda name: instructions(lines.get(name, []))
        )

    def places(self, start: str = "") -> Iterator[Place]:
        """Yields every line that runs; which branches of a conditional do is said by `taken`.

        start: the computation to begin with; "" is the entry.
        """
        yield from self._visit(start or self.entry, (), ())

    def loop(self, one: Instruction) -> tuple[str, int | None] | None:
        """Returns (body, trip count) of a while; None for a count that the program does not say."""
        if one.opcode != "while" or not (body := one.get("body")):
            return None
        if (count := one.trips) is not None:
            return body, count
        if steps := _STEPS.search(one.attributes):
            return body, max(round(self._live_rows * int(steps[1])), 1)
        most = _MOST.search(one.attributes)
        return body, int(most[1]) if most else None

    def taken(self, one: Instruction) -> list[str]:
        """Returns the branches of a conditional that count as running: both of two, of which one
        does nothing as a rule; of more, which do various parts of the same work, the fullest."""
        branches = one.branches
        return branches if len(branches) <= 2 else [max(branches, key=self.flops_of)]

    def _visit(self, name: str, loops: tuple[int, ...], bodies: tuple[str, ...]) -> Iterator[Place]:
        lines = self.computations.get(name, [])
        for index, line in enumerate(lines):
            yield Place(name, lines, index, loops, bodies)
            if (one := parse(line)) is None:
                continue
            if loop := self.loop(one):
                yield from self._visit(loop[0], (*loops, loop[1] or 1), (*bodies, loop[0]))
            elif one.opcode in CALLS:
                for called in (*one.called, *self.taken(one)):
                    yield from self._visit(called, loops, bodies)

    def flops(self, lines: Sequence[str], computation: str) -> int:
        """Returns the matmul FLOPs of some lines of a computation, calls and loops included."""
        total = 0
        for one in instructions(lines).values():
            if loop := self.loop(one):
                total += (loop[1] or 1) * self.flops_of(loop[0])
            elif one.opcode in CALLS:
                total += sum(self.flops_of(called) for called in (*one.called, *self.taken(one)))
            elif one.opcode == "dot":
                total += dot_flops(one, self.instructions(computation))
            elif one.opcode == "custom-call":
                line = f" = {one.shape} {one.opcode}({one.arguments}){one.attributes}"
                if match := _GROUPED.search(line):
                    total += round(self._live_rows * _grouped(*match.groups()))
        return total


def dot_flops(one: Instruction, around: Mapping[str, Instruction]) -> int:
    """Returns 2 M N K of all batches of a dot. around: the instructions of its computation."""
    left = around.get(one.operands[0]) if one.operands else None
    return 0 if left is None else 2 * one.array.elements * contracted(one, left.array)


def contracted(one: Instruction, left: Array) -> int:
    """Returns the length of the sum of a dot whose first operand this is."""
    return math.prod(left.dims[i] for i in one.dims("lhs_contracting_dims"))


def _grouped(result: str, operands: str, kind: str) -> int:
    """Returns the FLOPs of a grouped product if all rows are in groups.

    kind: 'matmul', which multiplies rows (M, K) by the weights of their group to (M, N), or
    'weights', which computes the gradient (G, K, N) of the weights from (M, K) and (M, N).
    """
    made = ARRAY.search(result)
    dims = ints(made[2]) if made else []
    left, *_ = (ints(d) for t, d in ARRAY.findall(operands) if t != "s32")
    return 2 * math.prod(dims) * left[1] if kind == "matmul" else 2 * left[0] * math.prod(dims[1:])


# ---- hlo


KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
_COLLECTIVE = re.compile(rf"= (.*?) ((?:ragged-)?(?:{'|'.join(KINDS)}))(-start)?\(")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    axes: mesh axes that it spans. arrays: how many arrays it sends, since the compiler may combine
    several. nbytes: on one device in one execution, of its operands or its results, whichever are
    larger. loops: trip counts of the enclosing loops, outermost first. is_async: whether it is
    started and finished by separate instructions, so that computation may run in between. op_name:
    the name of the model's operation that asked for it. flops_beside: the FLOPs of the matrix
    products that the schedule puts between its start and its end. bodies: names of the enclosing
    loops' bodies. groups: the first group of devices; of a permute all (source, target) pairs.
    taken: for a collective in a branch of a conditional, how often that branch runs, if the caller
    knows it; None: in every iteration of its loops.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: int
    nbytes: int
    loops: tuple[int, ...]
    is_async: bool
    op_name: str
    flops_beside: int
    bodies: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    taken: float | None = None

    @property
    def executions(self) -> float:
        """How often it runs in one call of the program (a mean, see `taken`)."""
        return math.prod(self.loops) if self.taken is None else self.taken

    @property
    def total(self) -> int:
        """Bytes of all executions."""
        return round(self.nbytes * self.executions)

    @property
    def is_hidden(self) -> bool:
        """Whether a matmul is scheduled beside it."""
        return self.is_async and self.flops_beside > 0

    @property
    def is_backward(self) -> bool:
        """Whether differentiation made it."""
        return "transpose(" in self.op_name

    def within(self, scope: str) -> bool:
        """Whether it belongs to a named scope and runs inside a loop of it."""
        return bool(re.search(rf"\b{scope}\b.*/while/body", self.op_name))


def collectives(
    text: str, mesh_shape: Mapping[str, int], live_rows: float = 1.0
) -> list[Collective]:
    """Returns the collectives of an optimised module (`compiled.as_text()`).

    A permute from every device to itself is a copy and is left out. live_rows: as of Module.
    """
    sent = []
    devices = math.prod(mesh_shape.values())
    module = Module(text, live_rows)
    for place in module.places():
        match = _COLLECTIVE.search(place.line)
        if match is None or "-done(" in place.line:
            continue
        result, kind, start = match.groups()
        groups = device_groups(place.line, devices)
        if kind == "collective-permute" and all(a == b for a, b in groups):
            continue
        arrays = ARRAY.findall(result)
        if start and len(arrays) > 1:  # a -start gives its inputs, then its outputs
            arrays = arrays[len(arrays) // 2 :]
        parts = [nbytes(a) for a in arrays]
        size = sum(parts) * (len(groups[0]) if kind == "reduce-scatter" else 1)
        is_async = bool(start) and '"is_sync":true' not in place.line
        overlapped = place.until_done() if is_async else ()
        # The axes along which the members of a group differ.
        coordinates = np.array(np.unravel_index(np.array(groups), tuple(mesh_shape.values())))
        differ = (coordinates != coordinates[..., :1]).any((1, 2))
        sent.append(
            Collective(
                kind,
                tuple(axis for axis, differs in zip(mesh_shape, differ, strict=True) if differs),
                len(parts),
                size,
                place.loops,
                is_async,
                _op_name(place),
                module.flops(overlapped, place.computation),
                place.bodies,
                groups,
            )
        )
    return sent


def attributed(sent: Sequence[Collective]) -> float:
    """Returns the fraction of all collective bytes whose mesh axes and operation are known."""
    total = sum(c.total for c in sent)
    return sum(c.total for c in sent if c.axes and c.op_name) / total if total else 1.0


def _op_name(place: Place) -> str:
    """Returns the instruction's op_name, or that of the first operand that has one."""
    if name := re.search(r'op_name="([^"]*)"', place.line):
        return name[1]
    operands = re.findall(r"%([\w.\-]+)", place.line.split("(", 1)[1].split("), ", 1)[0])
    for line in place.lines[: place.index]:
        match = NAME.match(line)
        if match and match[1] in operands and (name := re.search(r'op_name="([^"]*)"', line)):
            return name[1]
    return ""


def device_groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the first group of devices of a collective's line, or all pairs of a permute."""
    groups = replica_groups(line, devices)
    return groups if "source_target_pairs=" in line else groups[:1]


def replica_groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns all groups of devices of a collective's line, or all pairs of a permute.

    XLA spells replica_groups in four ways: over a named mesh, as an iota with a transposition, as
    lists, and empty for all devices.
    """
    match = _SPELLED.search(line)
    groups = _groups(match[1]) if match else ()
    return groups or (tuple(range(devices)),)


_SPELLED = re.compile(
    r"(?:source_target_pairs|replica_groups)="
    r"(\{\{[\d,{}\s]*\}\}|mesh\[[^\]]*\] ?\{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)


@functools.lru_cache(maxsize=256)
def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Returns the groups that a text spells as a mesh, as an iota or as lists."""
    if text.startswith("mesh"):
        ids = _mesh_groups(*text.removeprefix("mesh[").split("]", 1))
    elif "<=" in text:
        shape, dims, *order = (ints(part) for part in re.findall(r"[\d,]*\d", text))
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(*order or [None]).reshape(shape)
    else:
        return tuple(tuple(ints(group)) for group in re.findall(r"\{([\d,]+)\}", text))
    return tuple(map(tuple, ids.tolist()))


def _mesh_groups(mesh: str, axes: str) -> np.ndarray:
    """Returns the groups, one a row, of a named mesh: 'a'=4,'b'=8 and {'a','b':(2)4}.

    Here a group spans the axis a and a part of the axis b. `(2)4` means that b is split into
    factors, outermost first, and that the part is the factor of size 4 after a factor of size 2.
    """
    listed = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    shape: list[int] = []
    places: dict[tuple[str, str], int] = {}
    for name, ways in ((n, int(s)) for n, s in re.findall(r"'(\w+)'=(\d+)", mesh)):
        before = 1
        for first, part in sorted((int(f or 1), int(p or ways)) for n, f, p in listed if n == name):
            shape += [first // before, part]
            places[name, str(first)] = len(shape) - 1
            before = first * part
        shape.append(ways // before)
    spanned = [places[name, first or "1"] for name, first, _ in listed]
    others = [place for place in range(len(shape)) if place not in spanned]
    ids = np.arange(math.prod(shape)).reshape(shape).transpose(*others, *spanned)
    return ids.reshape(-1, math.prod(shape[place] for place in spanned))


# ---- traps
#
# Warns of collectives in a compiled program that should not be there, or run over slow links.
#
# Every one of these was seen in a program for thousands of GPUs that looked right in small tests.
# The compiler chooses them without a warning. docs/log/ has the findings; MegaScale section 3.2
# describes the communication that belongs there instead.


PLACES = 3  # that a sentence names (chosen)
_SCOPE = re.compile(
    r"jit\(_?\w+\)|jit|while|body|eval_jaxpr|cond|branch_\d+_fun|shard_map|checkpoint"
)
SMALL = 2**20  # bytes of an array (chosen: norms, biases and scalars stay below)


def find(
    sent: Iterable[Collective], cut: tuple[str, ...], gpus_per_pod: int | None = None
) -> list[str]:
    """Returns a sentence for each kind of suspicious collectives and the axes that they run over.

    A program has one collective for each place in the model that asks for it, dozens in a pipeline;
    a sentence adds them up and names the places, with those that send most first.
    cut: axes over which weights are sharded at rest. gpus_per_pod: devices under one set of
    switches.
    """
    sent = list(sent)
    ticks = {c.bodies[-1] for c in sent if c.bodies and c.axes == ("pipe",)}
    faults: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}

    def note(what: str, c: Collective) -> None:
        faults.setdefault((what, c.axes), []).append(c)

    for c in sent:
        if c.nbytes <= SMALL * c.arrays:
            continue
        data = set() if _is_exchange(c) else set(c.axes) & set(ZERO_AXES)
        if c.kind == "all-reduce" and set(c.axes) & set(cut):
            note("all-reduce where a reduce-scatter belongs", c)
        if data and ticks & set(c.bodies):
            note(f"{c.kind} inside the pipeline's tick loop", c)
        elif c.kind == "all-gather" and data and "scatter" in c.op_name.rsplit("/", 1)[-1]:
            note("updates of a scatter gathered instead of scattered", c)
        if "pipe" in c.axes and gpus_per_pod:
            far = sum(len({d // gpus_per_pod for d in group}) > 1 for group in c.groups)
            if far:
                note(f"pipeline neighbours in different pods: {far} of {len(c.groups)} pairs", c)
    return [_sentence(what, axes, group) for (what, axes), group in faults.items()]


def _sentence(what: str, axes: tuple[str, ...], group: list[Collective]) -> str:
    """Returns what some collectives send together, and where the model asks for them."""
    places: dict[str, float] = {}
    for c in group:
        name = _place(c.op_name)
        places[name] = places.get(name, 0) + c.total
    names = sorted(places, key=lambda name: -places[name])
    more = f" and {len(names) - PLACES} more" if len(names) > PLACES else ""
    sent, runs = sum(c.total for c in group), sum(c.executions for c in group)
    link = "," if ":" in what else ":"
    return (
        f"{what}{link} {size(sent)} a step over {'+'.join(axes)}, {runs:g} x "
        f"({', '.join(names[:PLACES])}{more})"
    )


def _place(op_name: str) -> str:
    """Returns the place in the model that an operation's name tells, without what jit, loops,
    branches and shard_map add to it."""
    if op_name.startswith("(") and op_name.endswith(")"):  # several, joined by the compiler
        op_name = op_name[1:-1]
    names = (name.split("/") for name in op_name.split(":"))
    places = ("/".join(p for p in parts if not _SCOPE.fullmatch(p)) for parts in names)
    return " + ".join(dict.fromkeys(places)) or "?"


def _is_exchange(c: Collective) -> bool:
    """Whether tokens travel to their experts or home, which every microbatch must do."""
    names = c.op_name.split(":")  # of collectives that the compiler joined
    among = "expert" in c.axes and set(c.axes) <= {"expert", "tensor"}
    return among and all("experts" in name for name in names)
