"""The entry point of LLM-PQ's planner: `plan` turns a workload and a cluster into a placement."""

from typing import Any, Literal

from megajax.core.errors import UserError
from megajax.core.hardware import Cluster, MixedCluster
from megajax.cost.base import CostModel
from megajax.cost.roofline import Roofline
from megajax.systems.llm_pq.costs import Workload, problem_of
from megajax.systems.llm_pq.problem import Placement, Problem, held, omega_of
from megajax.systems.llm_pq.solver import Solver, solve
from megajax.systems.llm_pq.splits import even_split


def uniform_bits(problem: Problem) -> int | None:
    """Returns the largest number of bits with which an even split of the layers fits, or None."""
    stages = even_split(problem)
    for bits in sorted(problem.bits, reverse=True):
        need = held(problem, stages, [bits] * problem.layers)
        rooms = (problem.memory[d] for d, _, _ in stages)
        if all(n <= room * (1 + 1e-9) for n, room in zip(need, rooms, strict=True)):
            return bits
    return None


def equal_quality(problem: Problem) -> float:
    """Returns the sum of omega if all layers have the bits of `uniform_bits`.

    If no width fits, it is the sum at the lowest width.
    """
    bits = uniform_bits(problem)
    return omega_of(problem, [min(problem.bits) if bits is None else bits] * problem.layers)


def plan(
    workload: Workload,
    cluster: MixedCluster | Cluster,
    *,
    quality: Literal["equal"] | float | None = "equal",
    solver: Solver = "exact",
    time_limit_s: float = 60,
    model: CostModel = Roofline(),
) -> Placement:
    """Returns the placement with the most tokens a second.

    Args: quality: bound on the loss of quality, the sum of omega; 'equal': `equal_quality`; None:
      no bound. solver, time_limit_s: as in `solve`. model: gives the times; the default has assumed
      efficiencies.
    Raises: UserError as `solve`, and for a workload or a cluster of another type.
    """
    if not isinstance(workload, Workload):
        raise UserError(f"plan: workload must be an llm_pq.Workload, got {_named(workload)}")
    if not isinstance(cluster, MixedCluster | Cluster):
        raise UserError(
            "plan: cluster must be a MixedCluster or a Cluster of megajax.core.hardware, got "
            f"{_named(cluster)}; parse_mixed('t4:3,v100:1') of that module makes one"
        )
    problem = problem_of(workload, cluster, model)
    if isinstance(quality, str):
        if quality != "equal":
            raise UserError(f"quality={quality} must be 'equal', a number, or None (--quality)")
        quality = equal_quality(problem)
    return solve(problem, quality=quality, solver=solver, time_limit_s=time_limit_s)


def _named(value: Any) -> str:
    """Returns a value of the wrong type for a message: its text if that is short, and its type."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, str | int | float) else f"a {kind}"
