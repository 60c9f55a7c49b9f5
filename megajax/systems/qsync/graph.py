"""The work of a training step on one kind of device, by the precision of each operation.

A `Graph` is the local data-flow graph of QSync (arXiv 2407.02327): nodes with their seconds and
saved bytes in every precision, and the gradient exchange in buckets. `replay` gives a step its
time, `Precisions` (quant/precisions.py) holds what each kind computes in, and allocator.py chooses
it. All kinds of a job compute the same step, each on its share of the batch, and exchange the same
buckets. Plain numbers, no jax.

Each kind runs its graph forward, then backward in reverse. Where the two ends of an edge differ in
precision, each pass casts once, within the time of the node that reads. A bucket of gradients is
exchanged when every kind has all of its gradients and the bucket before it is over; it takes the
seconds of the slowest kind. The steps are tasks of schedule/simulator.py. Not counted: the
optimizer's update, and how much an exchange slows the computation beside it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megajax.core.errors import UserError, did_you_mean
from megajax.quant.precisions import PRECISIONS, RANK
from megajax.schedule import simulator
from megajax.schedule.ir import Task


@dataclass(frozen=True)
class Node:
    """An operation and its derivative.

    inputs: names of earlier nodes. forward_s, backward_s: {precision: seconds}. elements: of its
    output. saved_bytes: {precision: bytes that the forward pass keeps for the backward pass}.
    omega: {precision: error that it adds to the gradients}, whose keys are the precisions that the
    node may have. None: the node has no choice and takes the precision of its widest input, or
    float32 without inputs.
    """

    name: str
    inputs: tuple[str, ...]
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    elements: float
    saved_bytes: Mapping[str, float]
    omega: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Raises: UserError for precisions that do not exist, and numbers that are none."""
        object.__setattr__(self, "inputs", tuple(dict.fromkeys(self.inputs)))
        tables = {key: getattr(self, key) for key in ("forward_s", "backward_s", "saved_bytes")}
        if self.omega is not None:
            tables["omega"] = self.omega
            if not self.omega:
                raise UserError(f"{self.name}: omega={{}} must name a precision, or be None")
        for key, table in tables.items():
            for precision, value in table.items():
                _check_precision(precision, f"{self.name}: {key}")
                if not 0 <= value < math.inf:
                    raise UserError(
                        f"{self.name}: {key}[{precision!r}]={value} must be finite and at least 0"
                    )
            if lacking := set(self.omega or ()) - set(table):
                raise UserError(
                    f"{self.name}: {key} has no number for {min(lacking)}, which omega allows"
                )
        if not 0 <= self.elements < math.inf:
            raise UserError(f"{self.name}: elements={self.elements} must be at least 0")


@dataclass(frozen=True)
class Graph:
    """A step on one kind of device.

    nodes: in the order of the forward pass; the backward pass runs in reverse. buckets: (names of
    the nodes whose gradients it holds, seconds that this kind needs to exchange it), in the order
    sent. cast_s: (seconds an element, seconds) of a change of precision.
    """

    nodes: tuple[Node, ...]
    buckets: tuple[tuple[tuple[str, ...], float], ...] = ()
    cast_s: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        """Raises: UserError for names that come twice or too early, and numbers that are none."""
        object.__setattr__(self, "nodes", tuple(self.nodes))
        buckets = tuple((tuple(names), seconds) for names, seconds in self.buckets)
        object.__setattr__(self, "buckets", buckets)
        earlier: set[str] = set()
        for node in self.nodes:
            if node.name in earlier:
                raise UserError(f"two nodes have one name: {node.name}")
            if unknown := [name for name in node.inputs if name not in earlier]:
                raise UserError(
                    f"{node.name} reads {unknown[0]}, which is no earlier node."
                    f"{did_you_mean(unknown[0], earlier)}"
                )
            earlier.add(node.name)
        for names, seconds in buckets:
            if unknown := [name for name in names if name not in earlier]:
                raise UserError(
                    f"a bucket has the gradient of {unknown[0]}, which is no node."
                    f"{did_you_mean(unknown[0], earlier)}"
                )
            if not 0 <= seconds < math.inf:
                raise UserError(f"a bucket takes {seconds} s; it must be finite and at least 0")
        if len(self.cast_s) != 2 or not all(0 <= value < math.inf for value in self.cast_s):
            raise UserError(
                f"cast_s={self.cast_s} must be two numbers of at least 0: (seconds an element, "
                "seconds)"
            )

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    def precisions(self, chosen: Mapping[str, str], kind: str) -> dict[str, str]:
        """Returns the precision of every node.

        Args: chosen: of the nodes that have a choice; those with one precision may be missing.
          kind: the name of this graph, for messages.
        Raises: UserError for a node that is unknown, lacks a choice or must not have this one.
        """
        if unknown := [name for name in chosen if name not in self.by_name]:
            raise UserError(
                f"kind {kind} has no node {unknown[0]}.{did_you_mean(unknown[0], self.by_name)}"
            )
        row: dict[str, str] = {}
        for node in self.nodes:
            inputs = (row[name] for name in node.inputs)
            precision = max(inputs, key=RANK.__getitem__, default="float32")
            if node.omega is not None:
                if node.name not in chosen and len(node.omega) > 1:
                    raise UserError(f"kind {kind}: no precision is given for {node.name}")
                precision = chosen.get(node.name, next(iter(node.omega)))
                _check_precision(precision, f"kind {kind}: {node.name}", node.omega)
            elif chosen.get(node.name, precision) != precision:
                raise UserError(
                    f"kind {kind}: {node.name} has no choice; it takes its widest input's "
                    f"{precision}, not {chosen[node.name]}"
                )
            row[node.name] = precision
            for key in ("forward_s", "backward_s", "saved_bytes"):
                if precision not in getattr(node, key):
                    raise UserError(f"kind {kind}: {node.name} has no {key} in {precision}")
        return row

    def edge_cast_s(self, name: str) -> float:
        """Returns the seconds to cast a node's output once."""
        an_element, fixed = self.cast_s
        return an_element * self.by_name[name].elements + fixed


def _check_precision(
    precision: str, where: str, allowed: Mapping[str, float] | tuple[str, ...] = PRECISIONS
) -> None:
    if precision not in allowed:
        raise UserError(
            f"{where}: {precision!r} must be one of {', '.join(allowed)}."
            f"{did_you_mean(precision, allowed)}"
        )


def check_kinds(graphs: Mapping[str, Graph]) -> None:
    """Raises: UserError where kinds do not exchange the same number of buckets."""
    if not graphs:
        raise UserError("a job needs at least one kind of device")
    counts = {kind: len(graph.buckets) for kind, graph in graphs.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{kind}: {count}" for kind, count in counts.items())
        raise UserError(f"all kinds must exchange the same buckets; their numbers differ ({shown})")


# ---- replay


class Replay(NamedTuple):
    """A step.

    step_s: seconds until all kinds and buckets have ended. casts: {kind: edges (from, to) that are
    cast, in the forward order of `to`}. memory: {kind: bytes that the forward pass saves}.
    """

    step_s: float
    casts: dict[str, list[tuple[str, str]]]
    memory: dict[str, float]


def replay(graphs: Mapping[str, Graph], precisions: Mapping[str, Mapping[str, str]]) -> Replay:
    """Returns the step of all kinds, each with its own precisions.

    Args: precisions: {kind: {node: precision}} of all nodes that may have several.
    Raises: UserError for kinds, nodes or precisions that do not fit the graphs.
    """
    check_kinds(graphs)
    if unlike := set(graphs) ^ set(precisions):
        kind = min(unlike)
        problem = "lack" if kind in graphs else "have too many:"
        raise UserError(f"the precisions {problem} kind {kind}.{did_you_mean(kind, graphs)}")
    tasks: list[Task] = []
    casts, memory = {}, {}
    for kind, graph in graphs.items():
        row = graph.precisions(precisions[kind], kind)
        casts[kind] = [
            (name, node.name)
            for node in graph.nodes
            for name in node.inputs
            if row[name] != row[node.name]
        ]
        memory[kind] = sum(node.saved_bytes[row[node.name]] for node in graph.nodes)
        cast_s = dict.fromkeys(row, 0.0)
        for source, reader in casts[kind]:
            cast_s[reader] += graph.edge_cast_s(source)
        for letter, nodes in (("F", graph.nodes), ("B", graph.nodes[::-1])):
            for node in nodes:
                table = node.forward_s if letter == "F" else node.backward_s
                seconds = table[row[node.name]] + cast_s[node.name]
                name = f"{letter} {kind!r} {node.name!r}"
                tasks.append(Task(name, f"kind {kind!r}", (), seconds, letter))
    for number, buckets in enumerate(
        zip(*(graph.buckets for graph in graphs.values()), strict=True)
    ):
        deps = tuple(
            f"B {kind!r} {name!r}"
            for kind, (names, _) in zip(graphs, buckets, strict=True)
            for name in names
        )
        seconds = max(seconds for _, seconds in buckets)
        tasks.append(Task(f"bucket {number}", "network", deps, seconds, "COMM"))
    return Replay(float(simulator.run(tasks, ()).end), casts, memory)
