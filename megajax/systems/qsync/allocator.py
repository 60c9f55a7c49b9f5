"""Which precisions each kind of device computes in (QSync's allocator, arXiv 2407.02327).

Among the plans that keep the memory, those whose step is the shortest; among these, the one with
the least sum of omega. Only the end of a step joins the kinds: a bucket waits for the last of them,
and max and + are monotone, so a step takes as long as the longest of the steps that each kind would
have if the other kinds took no time. So each kind is chosen for alone, once its target time is
known: the longest of the kinds' shortest steps.

`greedy` starts from uniform plans and changes runs of nodes; `exact` is a mixed-integer program
(search/program.py). `search.assign` cannot say this choice, because casts belong to pairs of nodes.

Legend: N nodes, E edges, P precisions.
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.quant.precisions import PRECISIONS, RANK, Precisions
from megajax.search.program import Program
from megajax.systems.qsync.graph import Graph, check_kinds

SLACK = 1e-9  # of the shortest step, for sums of floats in another order
EXACT_S = 60.0  # (chosen) seconds of all programs together
UNIT = 1000.0  # (chosen) the size of a program's rows: HiGHS keeps them to an absolute 1e-6
Score = tuple[float, float, float]


def allocate(
    graphs: Mapping[str, Graph],
    devices: Mapping[str, int],
    *,
    memory: Mapping[str, float],
    method: Literal["greedy", "exact"] = "greedy",
) -> Precisions:
    """Returns the precisions of all nodes that have a choice.

    min sum of omega over kinds and nodes, of the plans with memory(kind) <= memory[kind] and the
    shortest step of those

    Args: devices: of each kind; devices of a kind compute alike and omega is a kind's, so the
      numbers change no choice. memory: bytes for what the forward pass saves; a kind without an
      entry has no limit. method: greedy is fast; its step is no longer than that of any uniform
      precision, but may not be the shortest. exact takes up to a minute; then `gap` of the result
      says what is not proven.
    Raises: UserError where no plan keeps the memory; for kinds and numbers that do not fit.
    """
    check_kinds(graphs)
    for name, table in (("devices", devices), ("memory", memory)):
        if unknown := [kind for kind in table if kind not in graphs]:
            raise UserError(
                f"{name} has kind {unknown[0]}, which has no graph."
                f"{did_you_mean(unknown[0], graphs)}"
            )
        for kind, value in table.items():
            if not value >= (least := int(name == "devices")):
                raise UserError(f"{name}[{kind!r}]={value} must be at least {least}")
    if lacking := [kind for kind in graphs if kind not in devices]:
        raise UserError(f"devices lacks kind {lacking[0]}; nearest: {lacking[0]}=1")
    if method not in ("greedy", "exact"):
        raise UserError(
            f"method={method} must be 'greedy' or 'exact'.{did_you_mean(method, ['exact'])}"
        )
    slowest = [
        max(seconds for _, seconds in buckets)
        for buckets in zip(*(graph.buckets for graph in graphs.values()), strict=True)
    ]
    kinds = [
        _Kind(kind, graph, float(memory.get(kind, math.inf)), slowest)
        for kind, graph in graphs.items()
    ]
    exact_s = EXACT_S / (2 * len(kinds)) if method == "exact" else 0.0
    # A kind whose good plan is faster than the fastest plan of another kind needs no better one.
    target, late, excess, total = 0.0, 0.0, 0.0, 0.0
    fastest = {kind.name: kind.greedy(0.0, []) for kind in kinds}
    for kind in sorted(kinds, key=lambda kind: kind.score(fastest[kind.name], 0.0), reverse=True):
        over, seconds, _ = kind.score(fastest[kind.name], target)
        if exact_s and (over > 0 or seconds > target):
            fastest[kind.name], gap = kind.exact(None, fastest[kind.name], exact_s)
            late = max(late, gap)
            over, seconds, _ = kind.score(fastest[kind.name], target)
        if over > 0:
            hint = "" if exact_s else "; method='exact' may find a smaller one"
            least = kind.limit + over
            raise UserError(
                f"memory[{kind.name!r}]={kind.limit:g}: no plan keeps this memory; the smallest "
                f"that was seen takes {least:g} bytes{hint}; nearest: {least:g}"
            )
        target = max(target, seconds)
    result = Precisions()
    for kind in kinds:
        plan = kind.greedy(target, [fastest[kind.name]])
        if exact_s and kind.score(plan, target)[2] > kind.least_omega:
            plan, gap = kind.exact(target, plan, exact_s)
            excess += gap
        total += kind.score(plan, target)[2]
        result[kind.name] = {kind.nodes[n].name: PRECISIONS[plan[n]] for n in kind.free}
    if exact_s and late <= SLACK * target:
        result.gap = excess / total if excess else 0.0
    return result


class _Kind:
    """A kind's graph in arrays. A plan is the rank of every node's precision."""

    def __init__(self, name: str, graph: Graph, limit: float, slowest: list[float]) -> None:
        """limit: bytes. slowest: seconds of each bucket.

        Raises: UserError for a node without numbers in a precision that it may have.
        """
        self.name, self.nodes, self.limit = name, graph.nodes, limit
        number = {node.name: n for n, node in enumerate(self.nodes)}
        self.inputs = [[number[i] for i in node.inputs] for node in self.nodes]
        self.options: list[list[int]] = []
        tables: dict[str, np.ndarray] = {
            key: np.full((len(self.nodes), len(PRECISIONS)), math.inf)
            for key in ("forward_s", "backward_s", "saved_bytes", "omega")
        }
        for n, node in enumerate(self.nodes):
            above = [self.options[i] for i in self.inputs[n]]
            low = max((options[0] for options in above), default=RANK["float32"])
            ranks = {rank for options in above for rank in options if rank >= low} or {low}
            if node.omega is not None:
                ranks = {RANK[precision] for precision in node.omega}
            self.options.append(sorted(ranks))
            for key, table in tables.items():
                values = getattr(node, key)
                for rank in ranks:
                    if values is not None and PRECISIONS[rank] not in values:
                        raise UserError(
                            f"kind {name}: {node.name} may be {PRECISIONS[rank]}, as its inputs "
                            f"may, but has no {key} in it"
                        )
                    table[n, rank] = 0.0 if values is None else values[PRECISIONS[rank]]
        self.forward_NP, self.backward_NP, self.saved_NP, self.omega_NP = tables.values()
        self.everyone = np.arange(len(self.nodes))
        self.free = [n for n, node in enumerate(self.nodes) if node.omega is not None]
        self.least_omega = sum(min(self.omega_NP[n]) for n in self.everyone)
        edges = [(i, n) for n, inputs in enumerate(self.inputs) for i in inputs]
        self.source_E, self.reader_E = np.array(edges, int).reshape(-1, 2).T
        self.cast_E = np.array([graph.edge_cast_s(self.nodes[i].name) for i, _ in edges])
        # The node after whose backward pass a bucket may go, and its seconds; None: at once.
        self.buckets = [
            (min((number[i] for i in names), default=None), seconds)
            for (names, _), seconds in zip(graph.buckets, slowest, strict=True)
        ]

    def complete(self, plan: np.ndarray) -> np.ndarray:
        """Returns a plan whose nodes without a choice follow their widest input."""
        plan = plan.copy()
        for n, node in enumerate(self.nodes):
            if node.omega is None:
                plan[n] = max((plan[i] for i in self.inputs[n]), default=RANK["float32"])
        return plan

    def score(self, plan: np.ndarray, target: float) -> Score:
        """Returns (bytes too many, seconds of the step but at least the target, omega).

        The sums have the order of `replay`, so both agree to the last bit.
        """
        count = len(self.nodes)
        differ_E = plan[self.source_E] != plan[self.reader_E]
        cast_N = np.bincount(self.reader_E, self.cast_E * differ_E, count)
        forward_N = self.forward_NP[self.everyone, plan] + cast_N
        backward_N = self.backward_NP[self.everyone, plan] + cast_N
        ends = np.concatenate([[0.0], forward_N, backward_N[::-1]]).cumsum().tolist()
        sent = 0.0
        for first, seconds in self.buckets:
            sent = max(sent, 0.0 if first is None else ends[2 * count - first]) + seconds
        saved = sum(self.saved_NP[self.everyone, plan].tolist())
        omega = sum(self.omega_NP[self.everyone, plan].tolist())
        return max(saved - self.limit, 0.0), max(ends[-1], sent, target), omega

    def greedy(self, target: float, plans: list[np.ndarray]) -> np.ndarray:
        """Returns a good plan: of these plans and simple ones the best, then changed while it gets
        better. A change gives one precision to 1, 2, 4, ... nodes in a row that have a choice.
        """
        for rank in range(len(PRECISIONS)):  # uniform, as far as nodes may be
            uniform = [
                next((r for r in options if r >= rank), options[-1]) for options in self.options
            ]
            plans = [*plans, np.array(uniform, int)]
        for table in (self.forward_NP + self.backward_NP, self.saved_NP):
            plans = [*plans, table.argmin(1)]
        plans = [self.complete(plan) for plan in plans]
        best = min(plans, key=lambda plan: self.score(plan, target))
        score, before = self.score(best, target), None
        runs = [
            self.free[start : start + 2**k]
            for k in range(len(self.free).bit_length())
            for start in range(len(self.free) - 2**k + 1)
        ]
        allowed_NP = np.isfinite(self.omega_NP)
        while score != before:
            before, changes = score, []
            for run in runs:
                for rank in range(len(PRECISIONS)):
                    nodes = [n for n in run if allowed_NP[n, rank] and best[n] != rank]
                    if nodes:
                        gain = self.omega_NP[nodes, best[nodes]] - self.omega_NP[nodes, rank]
                        changes.append((-float(gain.sum()), nodes, rank))
            for _, nodes, rank in sorted(changes):
                plan = best.copy()
                plan[nodes] = rank
                plan = self.complete(plan)
                if (changed := self.score(plan, target)) < score:
                    best, score = plan, changed
        return best

    def exact(
        self, target: float | None, plan: np.ndarray, seconds: float
    ) -> tuple[np.ndarray, float]:
        """Returns (the best plan, how much better another may be).

        Args: target: None: the plan with the shortest step; else the one with the least omega whose
          step is no longer. plan: a good one, which may break the memory. seconds: of HiGHS.
        """
        program = Program()
        takes, cast_of = self._choices(program)

        def sums(table_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            pairs = [(x, table_NP[n, r]) for n, taken in enumerate(takes) for r, x in taken.items()]
            return np.array([x for x, _ in pairs], int), np.array([value for _, value in pairs])

        unit_s = self.score(plan, 0.0)[1] / UNIT or 1.0
        step, is_cast = program.add(1), np.array([x is not None for x in cast_of], bool)
        casts_E = np.array([x for x in cast_of if x is not None], int)
        # Seconds from the end of a node's backward pass to the end of the buckets, at least.
        after, tail = {0: 0.0}, 0.0
        for first, bucket_s in reversed(self.buckets):
            tail += bucket_s
            if first is not None:
                after[first] = max(after.get(first, 0.0), tail)
        program.row([(step, 1.0)], low=tail / unit_s)
        for first, tail in after.items():
            passed_N = 1.0 * (self.everyone >= first)
            x, value = sums(self.forward_NP + np.where(passed_N, self.backward_NP.T, 0.0).T)
            cast_E = (self.cast_E * (1 + passed_N[self.reader_E]))[is_cast]
            terms = [(step, 1.0), (x, -value / unit_s), (casts_E, -cast_E / unit_s)]
            program.row(terms, low=tail / unit_s)
        if math.isfinite(self.limit):
            unit = np.where(np.isfinite(self.saved_NP), self.saved_NP, 0).max(1).sum() / UNIT or 1.0
            program.row([sums(self.saved_NP / unit)], high=self.limit / unit)
        part, unit = 1, unit_s
        if target is None:
            program.minimise([(step, 1.0)])
        else:
            program.row([(step, 1.0)], high=target * (1 + SLACK) / unit_s)
            highest = np.where(np.isfinite(self.omega_NP), self.omega_NP, 0).max(initial=0.0)
            part, unit = 2, highest / UNIT or 1.0
            program.minimise([sums(self.omega_NP / unit)])
        bound, is_proven = math.inf, not self.free
        while not is_proven:
            solution = program.solve(seconds)
            bound, is_proven = solution.bound, solution.closed
            if solution.x is None:
                break
            ranks = [max(taken, key=lambda r: solution.x[taken[r]]) for taken in takes]
            other = self.complete(np.array(ranks, int))
            over, step_s, _ = self.score(other, target or 0.0)
            if over == 0 and (target is None or step_s <= target * (1 + SLACK)):
                # The changes of `greedy` see what is smaller than HiGHS' tolerance.
                plan = self.greedy(step_s if target else 0.0, [other, plan])
                break
            # HiGHS keeps rows to a tolerance: a plan that breaks one is left out.
            all_of_it = np.array([takes[n][other[n]] for n in self.free])
            program.row([(all_of_it, 1.0)], high=len(self.free) - 1.0)
            is_proven = False
        value = self.score(plan, target or 0.0)[part]
        return plan, 0.0 if is_proven else max(value - bound * unit, 0.0)

    def _choices(self, program: Program) -> tuple[list[dict[int, int]], list[int | None]]:
        """Adds the variables of a plan.

        Returns: of each node {rank: the variable that is 1 where it has this rank}, nodes that take
          the rank of another share its variables; of each edge the variable that is at least 1
          where its ends differ, None where they cannot.
        """
        takes: list[dict[int, int]] = []
        for n, node in enumerate(self.nodes):
            above = [takes[i] for i in self.inputs[n]]
            if node.omega is None and above and all(taken is above[0] for taken in above):
                takes.append(above[0])
                continue
            options, is_free = self.options[n], node.omega is not None
            numbers = program.add(len(options), high=1, integer=is_free)
            program.row([(numbers, 1.0)], 1, 1)
            takes.append(dict(zip(options, numbers.tolist(), strict=True)))
            for rank in options if above and not is_free else ():
                # The node has this rank or a wider one where an input has, and only there.
                *inputs, result = (
                    np.array([x for r, x in taken.items() if r >= rank], int)
                    for taken in (*above, takes[n])
                )
                for one in inputs:
                    program.row([(result, 1.0), (one, -1.0)], low=0)
                program.row([(result, 1.0), *((one, -1.0) for one in inputs)], high=0)
        casts: dict[tuple[int, int], int] = {}
        cast_of = []
        for i, n in zip(self.source_E.tolist(), self.reader_E.tolist(), strict=True):
            pair = id(takes[i]), id(takes[n])
            if pair not in casts and pair[0] != pair[1]:
                cast = program.add(1, high=1)
                casts[pair] = casts[pair[::-1]] = int(cast[0])
                for one, other in ((takes[i], takes[n]), (takes[n], takes[i])):
                    for rank, x in one.items():  # one end has this rank and the other has not
                        equal = [(np.array([other[rank]]), 1.0)] if rank in other else []
                        program.row([(cast, 1.0), (np.array([x]), -1.0), *equal], low=0)
            cast_of.append(casts.get(pair))
        return takes, cast_of
