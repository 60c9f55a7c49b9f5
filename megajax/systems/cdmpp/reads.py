"""Which instructions of a compiled module read the result of which, through tuples and loops.

In a loop a turn reads what the turn before it has left in the loop's tuple: an instruction at the
end of a body has its readers at the body's beginning, and after the loop.
"""

import collections
from collections.abc import Mapping

from megajax.cost.hlo import Instruction, Module
from megajax.cost.program_work import FREE

# Their events last as long as those of the instructions inside.
CONTAINERS = frozenset(("while", "call", "conditional"))


class Reads:
    """Who reads whom in a module's text, and which instructions hold others.

    readers: {instruction: those that read its result}. containers: names of `CONTAINERS`.
    """

    def __init__(self, text: str):
        """Reads `compiled.as_text()`; names are unique in a module."""
        module = Module(text)
        of = {name: module.instructions(name) for name in module.computations}
        self._all = {one.name: one for each in of.values() for one in each.values()}
        self._roots = {
            name: [one for one in each.values() if one.is_root] for name, each in of.items()
        }
        loops = [one for one in self._all.values() if one.opcode == "while"]
        # {parameter of a body or condition: its loop}
        self._loops = _parameters(of, loops)
        self.containers = {one.name for one in self._all.values() if one.opcode in CONTAINERS}
        self.readers: dict[str, set[str]] = collections.defaultdict(set)
        for one in self._all.values():
            if one.opcode not in FREE:  # nothing runs for these
                for operand in one.operands:
                    for source in self._sources(operand, None, set()):
                        self.readers[source].add(one.name)

    def _sources(self, name: str, index: int | None, seen: set) -> set[str]:
        """Returns what computed a value: a part of it, if it is a tuple and `index` is a number."""
        one = self._all.get(name)
        if one is None or (name, index) in seen:
            return set()
        seen.add((name, index))
        if one.opcode == "get-tuple-element" and one.operands:
            return self._sources(one.operands[0], int(one.get("index", "0")), seen)
        if one.opcode == "tuple" and index is not None:
            return self._sources(one.operands[index], None, seen)
        loop = self._loops.get(name, one if one.opcode == "while" else None)
        if loop is not None and index is not None:
            # What the last turn left, and what was there before the first.
            left = [root.name for root in self._roots.get(loop.get("body"), ())]
            return set().union(
                *(self._sources(each, index, seen) for each in (*left, *loop.operands))
            )
        if one.opcode in FREE:
            return set().union(*(self._sources(each, None, seen) for each in one.operands))
        return {name}


def _parameters(
    of: Mapping[str, Mapping[str, Instruction]], loops: list[Instruction]
) -> dict[str, Instruction]:
    return {
        one.name: loop
        for loop in loops
        for inside in (loop.get("body"), loop.get("condition"))
        for one in of.get(inside, {}).values()
        if one.opcode == "parameter"
    }
