"""Reads a compiled module's text as computations: what runs, how often, and its matmul FLOPs.

The text of a scheduled module lists computations (the entry, bodies of loops, fusions). The lines
of a computation are instructions, in the order in which the device starts them. cost/hlo_text.py
reads a single line; this module follows calls, loops with their trip counts, and counts the FLOPs
of matrix products.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from megajax.cost.hlo_text import ARRAY, NAME, Array, Instruction, instructions, ints, parse

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
        rest = self.lines[self.index + 1 :]
        return next((rest[:k] for k, line in enumerate(rest) if done.search(line)), ())


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
        self.flops_of = functools.cache(self._flops_of)
        self.instructions = functools.cache(self._instructions)

    def places(self, start: str = "") -> Iterator[Place]:
        """Yields every line that runs; branches of a conditional all count as running.

        start: the computation to begin with; "" is the entry.
        """
        yield from self._visit(start or self.entry, (), ())

    def loop(self, one: Instruction) -> tuple[str, int | None] | None:
        """Returns (body, trip count) of a while; None for a count that the program does not say."""
        if one.opcode != "while" or not (body := one.get("body")):
            return None
        if count := re.search(r'known_trip_count":\{"n":"(\d+)"', one.attributes):
            return body, int(count[1])
        if steps := _STEPS.search(one.attributes):
            return body, max(round(self._live_rows * int(steps[1])), 1)
        most = _MOST.search(one.attributes)
        return body, int(most[1]) if most else None

    def _visit(self, name: str, loops: tuple[int, ...], bodies: tuple[str, ...]) -> Iterator[Place]:
        lines = self.computations.get(name, [])
        for index, line in enumerate(lines):
            yield Place(name, lines, index, loops, bodies)
            if (one := parse(line)) is None:
                continue
            if loop := self.loop(one):
                yield from self._visit(loop[0], (*loops, loop[1] or 1), (*bodies, loop[0]))
            elif one.opcode in CALLS:
                for called in (*one.called, *one.branches):
                    yield from self._visit(called, loops, bodies)

    def flops(self, lines: Sequence[str], computation: str) -> int:
        """Returns the matmul FLOPs of some lines of a computation, calls and loops included."""
        total = 0
        for one in instructions(lines).values():
            if loop := self.loop(one):
                total += (loop[1] or 1) * self.flops_of(loop[0])
            elif one.opcode in CALLS:
                total += sum(self.flops_of(called) for called in (*one.called, *one.branches))
            elif one.opcode == "dot":
                total += dot_flops(one, self.instructions(computation))
            elif one.opcode == "custom-call" and (match := _GROUPED.search(_line(one))):
                total += round(self._live_rows * _grouped(*match.groups()))
        return total

    def _flops_of(self, computation: str) -> int:
        return self.flops(self.computations.get(computation, []), computation)

    def _instructions(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation by name."""
        return instructions(self.computations.get(computation, []))


def dot_flops(one: Instruction, around: Mapping[str, Instruction]) -> int:
    """Returns 2 M N K of all batches of a dot. around: the instructions of its computation."""
    left = around.get(one.operands[0]) if one.operands else None
    return 0 if left is None else 2 * one.array.elements * contracted(one, left.array)


def contracted(one: Instruction, left: Array) -> int:
    """Returns the length of the sum of a dot whose first operand this is."""
    return math.prod(left.dims[i] for i in one.dims("lhs_contracting_dims"))


def _line(one: Instruction) -> str:
    return f" = {one.shape} {one.opcode}({one.arguments}){one.attributes}"


def _grouped(result: str, operands: str, kind: str) -> int:
    """Returns the FLOPs of a grouped product if all rows are in groups.

    kind: 'matmul', which multiplies rows (M, K) by the weights of their group to (M, N), or
    'weights', which computes the gradient (G, K, N) of the weights from (M, K) and (M, N).
    """
    made = ARRAY.search(result)
    dims = ints(made[2]) if made else []
    left, *_ = (ints(d) for t, d in ARRAY.findall(operands) if t != "s32")
    return 2 * math.prod(dims) * left[1] if kind == "matmul" else 2 * left[0] * math.prod(dims[1:])
