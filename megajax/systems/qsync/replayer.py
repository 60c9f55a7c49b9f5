"""The seconds of a step that unlike devices compute together (QSync's replayer, arXiv 2407.02327).

Each kind runs its graph forward, then backward in reverse. Where the two ends of an edge differ in
precision, each pass casts once, within the time of the node that reads. A bucket of gradients is
exchanged when every kind has all of its gradients and the bucket before it is over; it takes the
seconds of the slowest kind. The steps are tasks of schedule/simulator.py. Not counted: the
optimizer's update, and how much an exchange slows the computation beside it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megajax.core.errors import UserError, did_you_mean
from megajax.schedule import simulator
from megajax.schedule.ir import Task
from megajax.systems.qsync.graph import Graph, check_kinds


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

    Args: precisions: {kind: {node: precision}} of all nodes that have a choice.
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
