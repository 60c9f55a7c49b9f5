"""The entry point of LLM-PQ's planner: `plan` turns a workload and a cluster into a placement."""

from typing import Literal

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
    Raises: UserError as `solve`.
    """
    problem = problem_of(workload, cluster, model)
    if isinstance(quality, str):
        if quality != "equal":
            raise UserError(f"quality={quality} must be 'equal', a number, or None (--quality)")
        quality = equal_quality(problem)
    return solve(problem, quality=quality, solver=solver, time_limit_s=time_limit_s)
