"""Which collectives of a program compiled for emulated CPU devices may overtake others.

The rule is that of parallel/order.py, read from the program's text: a collective overtakes a loop,
a branch or a call with collectives in it that comes before it in the schedule, unless it needs
something of it.
"""

import re
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
CALLS = re.compile(r"(?:body|to_apply|calls|\w+_computation)=(%[\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
NAME = re.compile(r"%[\w.\-]+")


class Operation(NamedTuple):
    """One line of a computation."""

    name: str
    kind: str
    operands: list[str]
    calls: list[str]


def overtaking(text: str) -> list[tuple[str, str]]:
    """Returns (what may be overtaken, the collective or what holds it), in the order of the text.

    text: of a compiled program, `compiled.as_text()`.
    """
    computations, known = _computations(text), {}

    def moves(operation: Operation) -> bool:
        return operation.kind in COLLECTIVES or holds(operation)

    def holds(operation: Operation) -> bool:
        for call in operation.calls:
            if call not in known:
                known[call] = any(map(moves, computations.get(call, [])))
        return any(known[call] for call in operation.calls)

    found = []
    for operations in computations.values():
        needs, before = {}, []
        for one in operations:
            needed = set().union(*(needs.get(x, set()) for x in one.operands))
            if moves(one):
                found += [(x, one.name) for x in before if x not in needed]
            if holds(one) and one.kind not in COLLECTIVES:
                before.append(one.name)
                needed = needed | {one.name}
            needs[one.name] = needed
    return found


def _computations(text: str) -> dict[str, list[Operation]]:
    found: dict[str, list[Operation]] = {}
    for line in text.splitlines():
        if line.endswith("{") and "->" in line and not line.startswith(" "):
            here = found.setdefault(line.removeprefix("ENTRY ").split()[0], [])
        elif line.startswith(" ") and " = " in line:
            name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
            rest = rest[_close(rest) :] if rest.startswith("(") else rest.partition(" ")[2]
            kind, _, _ = rest.strip().partition("(")
            end = _close(rest.strip()[len(kind) :]) + len(kind)
            operands, given = rest.strip()[:end], rest.strip()[end:]
            called = CALLS.findall(given)
            called += [x for names in BRANCHES.findall(given) for x in NAME.findall(names)]
            here.append(Operation(name, kind, NAME.findall(operands), called))
    return found


def _close(text: str) -> int:
    """Returns the place behind the bracket that closes the first one."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return place + 1
    return len(text)
