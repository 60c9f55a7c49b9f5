"""How long ago what an instruction reads was last touched: whether a cache may still hold it.

The schedule of a module is walked with a clock that counts bytes: each launched instruction
advances it by what it reads and writes. An operand's reuse distance is the clock since it was last
read or written (CDMPP's leaves have the same number of loop nests, section 4). A loop is walked
twice and the second turn counts, so that what the turn before touched is known. Of an operand that
is only sliced, other parts are read in the turns between: its distance is its size or more.

Not here: which bytes an instruction touches (cost/program_body.py), the caches of a device.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megajax.cost import program_work as work
from megajax.cost.hlo_module import Module
from megajax.cost.hlo_text import Instruction

Key = tuple[str, str]  # a computation and an instruction of it
_WHOLE = 0.9  # of an operand: less is a slice (chosen)


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
    """distance: geometric mean over the bytes read of the bytes touched since. cold: bytes read of
    what nothing in the call touched before; their distance is all that the call touches. around:
    bytes that one turn of the innermost loop touches, or the call. turns: of all loops around it.
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
    found = {}
    for key, (logs, cold, around, turns) in walk.found.items():
        read = sum(nbytes for _, nbytes, _ in touched[key].read)
        mean = (logs + cold * math.log1p(total)) / read if read else math.log1p(total)
        found[key] = Reuse(math.exp(mean), cold, walk.around[around], turns)
    return found


class _Walk:
    """The clock, when each value was last touched, and what was found."""

    def __init__(self, module: Module, touched: Mapping[Key, Touched]):
        self.clock = 0.0
        self.found: dict[Key, tuple[float, float, str, float]] = {}
        self.around: dict[str, float] = {}
        self._module, self._touched = module, touched
        self._last: dict[str, float] = {}
        self._turns = 0

    def computation(self, name: str, given: Mapping[int, Any], turns: float, loop: str = "") -> Any:
        """Walks a computation and returns its result: a value's name, or a list of them.

        given: values of the parameters. turns: of all loops around. loop: the innermost one.
        """
        loop, began = loop or name, self.clock
        values: dict[str, Any] = {}
        result: Any = None
        self._turns += 1
        turn = self._turns  # values of different turns are different
        for one in self._module.instructions(name).values():
            own = f"{turn} {one.name}"
            before = [values.get(operand) for operand in one.operands]
            if one.opcode == "parameter":
                place = int(one.arguments) if one.arguments.isdigit() else 0
                values[one.name] = given.get(place, own)
            elif one.opcode == "constant":
                values[one.name] = f"{name} {one.name}"  # the same in every turn
            elif one.opcode == "get-tuple-element":
                index = int(one.get("index", "0") or 0)
                whole = before[0] if before else own
                if isinstance(whole, list):  # of a start: operands and results, not told apart
                    whole = whole[index] if index < len(whole) else own
                values[one.name] = whole
            elif one.opcode == "tuple":
                values[one.name] = before
            elif found := self._module.loop(one):
                values[one.name] = self._loop(found[0], found[1] or 1, before, turns)
            elif one.opcode in ("call", "async-start", "conditional"):
                inner = before[1:] if one.opcode == "conditional" else before
                for place, called in enumerate((*one.called, *one.branches)):
                    own_given = {0: inner[place]} if one.branches and place < len(inner) else (
                        dict(enumerate(inner))
                    )  # fmt: skip
                    values[one.name] = self.computation(called, own_given, turns, loop)
            elif one.opcode in work.FREE or one.opcode.endswith("-done"):
                values[one.name] = before[0] if before else own
            else:
                values[one.name] = self._launch((name, one.name), one, own, values, turns, loop)
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
            # What the last turn touched was touched by the last of all turns.
            more = (trips - 2) * (self.clock - began)
            for value, when in self._last.items():
                if when > began:
                    self._last[value] = when + more
            self.clock += more
        return state

    def _launch(
        self, key: Key, one: Instruction, own: str, values: Mapping[str, Any], turns: float,
        loop: str,
    ) -> Any:  # fmt: skip
        touched = self._touched.get(key)
        made = own if len(one.arrays) < 2 else [f"{own} {i}" for i in range(len(one.arrays))]
        if touched is None:
            return made
        logs, cold, seen = 0.0, 0.0, []
        for operand, nbytes, whole in touched.read:
            names = list(_leaves(values.get(operand)))
            known = [self._last[value] for value in names if value in self._last]
            seen += names
            if not known:
                cold += nbytes
                continue
            away = self.clock - max(known)
            if turns > 1 and nbytes < _WHOLE * whole:
                away = max(away, whole)
            logs += nbytes * math.log1p(away)
        self.found[key] = logs, cold, loop, turns
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
