"""Which collectives of a program compiled for emulated CPU devices may overtake others.

The rule is that of parallel/exchange.py, read from the program's text: a collective overtakes a
loop, a branch or a call with collectives in it that comes before it in the schedule, unless it
needs something of it.
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

    pairs = []
    for operations in computations.values():
        needs, before = {}, []
        for one in operations:
            needed = set().union(*(needs.get(x, set()) for x in one.operands))
            if moves(one):
                pairs += [(x, one.name) for x in before if x not in needed]
            if holds(one) and one.kind not in COLLECTIVES:
                before.append(one.name)
                needed = needed | {one.name}
            needs[one.name] = needed
    return pairs


def overtaken(text: str, kind: str) -> list[tuple[str, str]]:
    """Returns (a collective of this kind, a loop or a call with collectives in it that comes after
    it and may overtake it, because it needs nothing of it)."""
    computations = _computations(text)

    def holds(operation: Operation) -> bool:
        inner = [x for call in operation.calls for x in computations.get(call, [])]
        return any(x.kind in COLLECTIVES or holds(x) for x in inner)

    pairs = []
    for operations in computations.values():
        needs, before = {}, []
        for one in operations:
            needed = set().union(*(needs.get(x, set()) for x in one.operands))
            if one.kind not in COLLECTIVES and holds(one):
                pairs += [(x, one.name) for x in before if x not in needed]
            if one.kind == kind:
                before.append(one.name)
                needed = needed | {one.name}
            needs[one.name] = needed
    return pairs


def _computations(text: str) -> dict[str, list[Operation]]:
    computations: dict[str, list[Operation]] = {}
    for line in text.splitlines():
        if line.endswith("{") and "->" in line and not line.startswith(" "):
            operations = computations.setdefault(line.removeprefix("ENTRY ").split()[0], [])
        elif line.startswith(" ") and " = " in line:
            name, _, call = line.strip().removeprefix("ROOT ").partition(" = ")
            call = call[_close(call) :] if call.startswith("(") else call.partition(" ")[2]
            kind, _, _ = call.strip().partition("(")
            end = _close(call.strip()[len(kind) :]) + len(kind)
            operands, attributes = call.strip()[:end], call.strip()[end:]
            called = CALLS.findall(attributes)
            called += [x for names in BRANCHES.findall(attributes) for x in NAME.findall(names)]
            operations.append(Operation(name, kind, NAME.findall(operands), called))
    return computations


def _close(text: str) -> int:
    """Returns the place behind the bracket that closes the first one."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return place + 1
    return len(text)
