"""Finds the collectives of a compiled module: over which mesh axes they run, and how often.

It reads the scheduled HLO text that XLA prints. Only the text of a GPU target shows the real
communication (that of the CPU backend has no reduce-scatter), so inspect programs that were
compiled for H100s without a device (pallas_kernels/aot.py). An instruction's op_name says
which part of the model asked for it: it contains the named scopes of the model ('blocks', 'head')
and 'transpose' for the backward pass. How often a collective runs is the product of the trip counts
of the loops around it.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from megajax.cost.hlo_module import Module, Place
from megajax.cost.hlo_text import ARRAY, NAME, ints, nbytes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
_COLLECTIVE = re.compile(rf"= (.*?) ((?:ragged-)?(?:{'|'.join(KINDS)}))(-start)?\(")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    axes: mesh axes that it spans. arrays: how many arrays it sends, since the compiler may combine
    several. nbytes: on one device in one execution, of its operands or its results, whichever are
    larger. loops: trip counts of the enclosing loops, outermost first. is_async: whether it is
    started and finished by separate instructions, so that computation may run in between. op_name:
    of the model's operation that asked for it. flops_beside: of the matrix products that the
    schedule puts between its start and its end. bodies: names of the enclosing loops' bodies.
    groups: the first group of devices; of a permute all (source, target) pairs. taken: for a
    collective in a branch of a conditional, how often that branch runs, if the caller knows it;
    None: in every iteration of its loops.
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
    found = []
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
        parts = [nbytes(a) for a in _result_arrays(result, bool(start))]
        size = sum(parts) * (len(groups[0]) if kind == "reduce-scatter" else 1)
        is_async = bool(start) and '"is_sync":true' not in place.line
        beside = place.until_done() if is_async else ()
        found.append(
            Collective(
                kind,
                _axes(groups, mesh_shape),
                len(parts),
                size,
                place.loops,
                is_async,
                _op_name(place),
                module.flops(beside, place.computation),
                place.bodies,
                groups,
            )
        )
    return found


def attributed(found: Sequence[Collective]) -> float:
    """Returns the fraction of all collective bytes whose mesh axes and operation are known."""
    total = sum(c.total for c in found)
    return sum(c.total for c in found if c.axes and c.op_name) / total if total else 1.0


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


def _result_arrays(result: str, start: bool) -> list[tuple[str, str]]:
    """Returns the arrays that a collective gives; a -start gives (inputs, outputs)."""
    arrays = ARRAY.findall(result)
    return arrays[len(arrays) // 2 :] if start and len(arrays) > 1 else arrays


def device_groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the first group of devices of a collective's line, or all pairs of a permute.

    XLA spells replica_groups in four ways: over a named mesh, as an iota with a transposition, as
    lists, and empty for all devices.
    """
    if match := re.search(r"source_target_pairs=\{(\{[\d,{}\s]*\})\}", line):
        return tuple(tuple(ints(p)) for p in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
        return (_mesh_group(match[1], match[2]),)
    pattern = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if match := re.search(pattern, line):
        ids = np.arange(math.prod(ints(match[2]))).reshape(ints(match[2]))
        ids = ids.transpose(ints(match[3])) if match[3] else ids
        return (tuple(ids.reshape(ints(match[1]))[0].tolist()),)
    if match := re.search(r"replica_groups=\{\{([\d,]+)", line):
        return (tuple(ints(match[1])),)
    return (tuple(range(devices)),)


def _mesh_group(mesh: str, axes: str) -> tuple[int, ...]:
    """Returns the first group of replica_groups that name a mesh: mesh['a'=4,'b'=8] {'a','b':(2)4}.

    Here a group spans the axis a and a part of the axis b. `(2)4` means that b is split into
    factors, outermost first, and that the part is the factor of size 4 after a factor of size 2.
    """
    chosen = {m[0]: m[1:] for m in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)}
    shape: list[int] = []
    picks: list[slice | int] = []
    for name, size in ((n, int(s)) for n, s in re.findall(r"'(\w+)'=(\d+)", mesh)):
        before, part = (int(i) if i else 0 for i in chosen.get(name, ("", "")))
        factors = [before, part, size // (before * part)] if part else [size]
        shape += factors
        picks += [0, slice(None), 0] if part else [slice(None) if name in chosen else 0]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return tuple(ids[tuple(picks)].ravel().tolist())


def _axes(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which the members of a group differ."""
    coordinates = np.array(np.unravel_index(np.array(groups), tuple(mesh_shape.values())))
    differ = (coordinates != coordinates[..., :1]).any((1, 2))
    return tuple(axis for axis, differs in zip(mesh_shape, differ, strict=True) if differs)
