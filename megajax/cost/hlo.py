"""Reads a compiled module's text: which collectives it runs, over which mesh axes, how often.

The scheduled HLO of the GPU target is the truth about communication; the CPU backend hides
reduce-scatter, so inspect deviceless H100 programs (pallas_kernels/aot.py). A collective's place is
known from its op_name: the named scopes of the model ('blocks', 'head') and 'transpose' for the
backward pass; how often it runs from the trip counts of the loops around it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2,
    "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
_COLLECTIVE = re.compile(rf"= (.*?) ((?:ragged-)?(?:{'|'.join(KINDS)}))(-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    axes: mesh axes it spans. arrays: how many it carries (the compiler combines). nbytes: of the
    larger side, one device. loops: trip counts of the enclosing loops, outermost first.
    is_async: started and finished apart, so that compute may lie between.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: int
    nbytes: int
    loops: tuple[int, ...]
    is_async: bool
    op_name: str

    @property
    def executions(self) -> int:
        """How often it runs in one call of the program."""
        return math.prod(self.loops)

    @property
    def is_backward(self) -> bool:
        """Whether differentiation made it."""
        return "transpose(" in self.op_name

    def within(self, scope: str) -> bool:
        """Whether it belongs to a named scope and runs inside a loop of it."""
        return bool(re.search(rf"\b{scope}\b.*/while/body", self.op_name))


def collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Returns the collectives of an optimised module (`compiled.as_text()`)."""
    found = []
    for line, loops in _lines_with_loops(text):
        match = _COLLECTIVE.search(line)
        if match is None or "-done(" in line:
            continue
        result, kind, start = match.groups()
        groups = _first_group(line)
        parts = [_size(a) for a in _result_arrays(result, bool(start))]
        nbytes = sum(parts) * (len(groups) if kind == "reduce-scatter" else 1)
        name = re.search(r'op_name="([^"]*)"', line)
        found.append(
            Collective(
                kind,
                _axes(groups, mesh_shape),
                len(parts),
                nbytes,
                loops,
                bool(start) and '"is_sync":true' not in line,
                name[1] if name else "",
            )
        )
    return found


def _lines_with_loops(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields every line that runs, with the trip counts around it."""
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = match[2]
            bodies[current] = []
            entry = current if match[1] else entry
        elif current:
            bodies[current].append(line)

    def visit(name: str, loops: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for line in bodies.get(name, []):
            yield line, loops
            if " while(" in line and (body := re.search(r"body=%?([\w.\-]+)", line)):
                count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                yield from visit(body[1], (*loops, int(count[1]) if count else 1))
            elif re.search(r" (?:fusion|call|conditional|async-start)\(", line):
                for called in _CALLED.findall(line):
                    yield from visit(called, loops)

    yield from visit(entry, ())


def _result_arrays(result: str, start: bool) -> list[tuple[str, str]]:
    """Returns the arrays that a collective gives; a -start gives (inputs, outputs)."""
    arrays = _ARRAY.findall(result)
    return arrays[len(arrays) // 2 :] if start and len(arrays) > 1 else arrays


def _size(array: tuple[str, str]) -> int:
    dtype, dims = array
    return BYTES.get(dtype, 4) * math.prod(_ints(dims))


def _ints(text: str) -> list[int]:
    return [int(i) for i in text.split(",") if i]


def _first_group(line: str) -> list[int]:
    """Returns the device numbers of the first group; XLA spells replica_groups in three ways."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
        dims = re.findall(r"'(\w+)'=(\d+)", match[1])
        ids = np.arange(math.prod(int(n) for _, n in dims)).reshape([int(n) for _, n in dims])
        return (
            ids[tuple(slice(None) if f"'{d}'" in match[2] else 0 for d, _ in dims)].ravel().tolist()
        )
    pattern = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if match := re.search(pattern, line):
        ids = np.arange(math.prod(_ints(match[2]))).reshape(_ints(match[2]))
        ids = ids.transpose(_ints(match[3])) if match[3] else ids
        return ids.reshape(_ints(match[1]))[0].tolist()
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)", line):
        return _ints(match[1])
    return [0]


def _axes(group: list[int], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which the members of a group differ."""
    coordinates = np.unravel_index(group, tuple(mesh_shape.values()))
    return tuple(
        axis for axis, c in zip(mesh_shape, coordinates, strict=True) if len(set(c.tolist())) > 1
    )
