"""Warns of collectives in a compiled program that should not be there, or run over slow links.

Every one of these was seen in a program for thousands of GPUs that looked right in small tests. The
compiler chooses them without a warning. LOG.md lists the findings; MegaScale section 3.2 describes
the communication that belongs there instead.
"""

from collections.abc import Iterable

from megajax.core.axes import ZERO_AXES
from megajax.cost.hlo import Collective
from megajax.cost.memory import size

SMALL = 2**20  # bytes of an array (chosen: norms, biases and scalars stay below)


def find(
    found: Iterable[Collective], cut: tuple[str, ...], gpus_per_pod: int | None = None
) -> list[str]:
    """Returns a sentence for every suspicious collective.

    cut: axes over which weights are sharded at rest. gpus_per_pod: devices under one set of
    switches.
    """
    found = list(found)
    ticks = {c.bodies[-1] for c in found if c.bodies and c.axes == ("pipe",)}
    warnings = []
    for c in found:
        if c.nbytes <= SMALL * c.arrays:
            continue
        data = set() if _is_exchange(c) else set(c.axes) & set(ZERO_AXES)
        where = f"{size(c.total)} a step over {'+'.join(c.axes)}, {c.executions:g} x ({c.op_name})"
        if c.kind == "all-reduce" and set(c.axes) & set(cut):
            warnings.append(f"all-reduce where a reduce-scatter belongs: {where}")
        if data and ticks & set(c.bodies):
            warnings.append(f"{c.kind} inside the pipeline's tick loop: {where}")
        elif c.kind == "all-gather" and data and "scatter" in c.op_name.rsplit("/", 1)[-1]:
            warnings.append(f"updates of a scatter gathered instead of scattered: {where}")
        if "pipe" in c.axes and gpus_per_pod and (far := _far(c, gpus_per_pod)):
            warnings.append(
                f"pipeline neighbours in different pods: {far} of {len(c.groups)} pairs, {where}"
            )
    return warnings


def _is_exchange(c: Collective) -> bool:
    """Whether tokens travel to their experts or home, which every microbatch must do."""
    names = c.op_name.split(":")  # of collectives that the compiler joined
    among = "expert" in c.axes and set(c.axes) <= {"expert", "tensor"}
    return among and all("experts" in name for name in names)


def _far(c: Collective, gpus_per_pod: int) -> int:
    return sum(len({d // gpus_per_pod for d in group}) > 1 for group in c.groups)
