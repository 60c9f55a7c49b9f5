"""The text of a compiled module as computations: what runs, how often, and its matmul FLOPs.

The order of the lines of a scheduled module is the order in which the device starts them. Only what
cost/hlo.py asks for is read: loops with their trip counts, calls, and the shapes of `dot`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2,
    "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALL = re.compile(r" (?:fusion|fusion-start|call|conditional|async-start)\(")
# A Mosaic GPU kernel of pallas_kernels/grouped: how its results and operands are spelled.
_GROUPED = re.compile(
    r"= (.*?) custom-call\(.*operand_layout_constraints=\{(.*?)\}, api_version.*"
    r'op_name="[^"]*/grouped_(matmul|weights)/'
)
# Its library path, a loop whose trip count depends on the groups: steps when they hold all rows.
_STEPS = re.compile(r'op_name="[^"]*/grouped_steps_(\d+)/')
_DOT = re.compile(r" dot\(%?([\w.\-]+),.*lhs_contracting_dims=\{([\d,]*)\}")


def ints(text: str) -> list[int]:
    """Returns the numbers of '4,2,8'."""
    return [int(i) for i in text.split(",") if i]


def nbytes(array: tuple[str, str]) -> int:
    """Returns the bytes of one (dtype, dims) that ARRAY found."""
    dtype, dims = array
    return BYTES.get(dtype, 4) * math.prod(ints(dims))


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

    def places(self) -> Iterator[Place]:
        """Yields every line that runs; branches of a conditional all count as running."""
        yield from self._visit(self.entry, (), ())

    def _visit(self, name: str, loops: tuple[int, ...], bodies: tuple[str, ...]) -> Iterator[Place]:
        lines = self.computations.get(name, [])
        for index, line in enumerate(lines):
            yield Place(name, lines, index, loops, bodies)
            if loop := self._loop(line):
                yield from self._visit(loop[0], (*loops, loop[1]), (*bodies, loop[0]))
            elif _CALL.search(line):
                for called in _CALLED.findall(line):
                    yield from self._visit(called, loops, bodies)

    def flops(self, lines: Sequence[str], computation: str) -> int:
        """Returns the matmul FLOPs of some lines of a computation, calls and loops included."""
        total = 0
        for line in lines:
            if loop := self._loop(line):
                total += loop[1] * self.flops_of(loop[0])
            elif _CALL.search(line):
                total += sum(self.flops_of(called) for called in _CALLED.findall(line))
            elif match := _DOT.search(line):
                total += self._dot(line, match[1], ints(match[2]), computation)
            elif match := _GROUPED.search(line):
                total += round(self._live_rows * _grouped(*match.groups()))
        return total

    def _loop(self, line: str) -> tuple[str, int] | None:
        """Returns (body, trip count) of a while; a count that nobody knows is 1."""
        if " while(" not in line or (body := re.search(r"body=%?([\w.\-]+)", line)) is None:
            return None
        if count := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
            return body[1], int(count[1])
        steps = _STEPS.search(line)
        return body[1], max(round(self._live_rows * int(steps[1])), 1) if steps else 1

    def _flops_of(self, computation: str) -> int:
        return self.flops(self.computations.get(computation, []), computation)

    def _dot(self, line: str, lhs: str, contracted: list[int], computation: str) -> int:
        made = ARRAY.search(line)
        for other in self.computations[computation]:
            if (match := NAME.match(other)) and match[1] == lhs and (array := ARRAY.search(other)):
                dims = ints(array[2])
                inner = math.prod(dims[i] for i in contracted)
                return 2 * math.prod(ints(made[2]) if made else []) * inner
        return 0


def _grouped(result: str, operands: str, kind: str) -> int:
    """Returns the FLOPs of a grouped product, all rows in groups: (M, K) by group to (M, N), or
    (M, K) and (M, N) to the weights' (G, K, N)."""
    made = ARRAY.search(result)
    dims = ints(made[2]) if made else []
    left, *_ = (ints(d) for t, d in ARRAY.findall(operands) if t != "s32")
    return 2 * math.prod(dims) * left[1] if kind == "matmul" else 2 * left[0] * math.prod(dims[1:])
