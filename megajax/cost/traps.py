"""Warns of collectives in a compiled program that should not be there, or run over slow links.

Every one of these was seen in a program for thousands of GPUs that looked right in small tests. The
compiler chooses them without a warning. LOG.md lists the findings; MegaScale section 3.2 describes
the communication that belongs there instead.
"""

import re
from collections.abc import Iterable

from megajax.core.axes import ZERO_AXES
from megajax.cost.hlo import Collective
from megajax.cost.memory import size

PLACES = 3  # that a sentence names (chosen)
_SCOPE = re.compile(
    r"jit\(_?\w+\)|jit|while|body|eval_jaxpr|cond|branch_\d+_fun|shard_map|checkpoint"
)
SMALL = 2**20  # bytes of an array (chosen: norms, biases and scalars stay below)


def find(
    found: Iterable[Collective], cut: tuple[str, ...], gpus_per_pod: int | None = None
) -> list[str]:
    """Returns a sentence for each kind of suspicious collectives and the axes that they run over.

    A program has one collective for each place in the model that asks for it, dozens in a pipeline;
    a sentence adds them up and names the places, with those that send most first.
    cut: axes over which weights are sharded at rest. gpus_per_pod: devices under one set of
    switches.
    """
    found = list(found)
    ticks = {c.bodies[-1] for c in found if c.bodies and c.axes == ("pipe",)}
    faults: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}

    def note(what: str, c: Collective) -> None:
        faults.setdefault((what, c.axes), []).append(c)

    for c in found:
        if c.nbytes <= SMALL * c.arrays:
            continue
        data = set() if _is_exchange(c) else set(c.axes) & set(ZERO_AXES)
        if c.kind == "all-reduce" and set(c.axes) & set(cut):
            note("all-reduce where a reduce-scatter belongs", c)
        if data and ticks & set(c.bodies):
            note(f"{c.kind} inside the pipeline's tick loop", c)
        elif c.kind == "all-gather" and data and "scatter" in c.op_name.rsplit("/", 1)[-1]:
            note("updates of a scatter gathered instead of scattered", c)
        if "pipe" in c.axes and gpus_per_pod and (far := _far(c, gpus_per_pod)):
            pairs = f"{far} of {len(c.groups)} pairs"
            note(f"pipeline neighbours in different pods: {pairs}", c)
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
    joined = dict.fromkeys(map(_parts, op_name.split(":")))
    return " + ".join(joined) or "?"


def _parts(name: str) -> str:
    return "/".join(part for part in name.split("/") if not _SCOPE.fullmatch(part))


def _is_exchange(c: Collective) -> bool:
    """Whether tokens travel to their experts or home, which every microbatch must do."""
    names = c.op_name.split(":")  # of collectives that the compiler joined
    among = "expert" in c.axes and set(c.axes) <= {"expert", "tensor"}
    return among and all("experts" in name for name in names)


def _far(c: Collective, gpus_per_pod: int) -> int:
    return sum(len({d // gpus_per_pod for d in group}) > 1 for group in c.groups)
