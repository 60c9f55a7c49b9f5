"""Computes reuse distances: how many bytes a program touches before it reads an array again.

A cache still holds an array if few bytes were touched since the array was last read or written. To
count them, the schedule of a module is walked with a clock that counts bytes: each launched
instruction advances it by the bytes that it reads and writes. The reuse distance of an operand is
what the clock advanced since the operand was last touched. (CDMPP has this number for loop nests as
a feature of its leaves, section 4.) A loop is walked for two iterations and the second one counts,
because the first does not know what the iteration before it touched. An operand of which each
iteration reads only a slice has at least its own size as its distance, because the other parts are
read in between.

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
            # The iterations that were not walked only advance the clock: what the second iteration
            # touched was touched by the last one, too.
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
