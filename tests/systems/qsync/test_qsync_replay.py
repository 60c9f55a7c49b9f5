"""The replayer against graphs worked out by hand and a queue of events that knows nothing of it."""

import dataclasses
import heapq
import random

import pytest

from megajax.core.errors import UserError
from megajax.systems.qsync import Graph, Node, replay

ORDER = ("int8", "fp8", "float16", "bfloat16", "float32")


def node(name, inputs=(), forward=1, backward=2, elements=10, saved=4, precisions=ORDER, free=True):
    """Seconds and bytes fall with the width: float32 takes `forward`, int8 a fifth of it."""
    part = {p: (ORDER.index(p) + 1) / 5 for p in precisions}
    return Node(
        name,
        inputs,
        {p: forward * part[p] for p in precisions},
        {p: backward * part[p] for p in precisions},
        elements,
        {p: saved * part[p] for p in precisions},
        {p: 1 - part[p] for p in precisions} if free else None,
    )


def test_one_kind_in_one_precision_by_hand():
    """Forward 1 + 2, backward 4 + 2; b's bucket may go from 7 to 10, a's follows from 10 to 11."""
    graph = Graph((node("a"), node("b", ("a",), 2, 4)), ((("b",), 3), (("a",), 1)))
    got = replay({"v": graph}, {"v": {"a": "float32", "b": "float32"}})
    assert got == (11, {"v": []}, {"v": 8})


def test_a_cast_in_each_pass_by_hand():
    """10 elements, 0.1 s each and 1 s more: b casts 2 s forward, 2 s backward.

    Forward 1 + (0.4 + 2), backward (0.8 + 2) + 2: the end is at 8.2. The gradient of b is there
    with its cast, at 6.2, and its bucket ends at 9.2.
    """
    graph = Graph((node("a"), node("b", ("a",), 2, 4)), ((("b",), 3),), (0.1, 1))
    got = replay({"v": graph}, {"v": {"a": "float32", "b": "int8"}})
    assert got.step_s == pytest.approx(9.2)
    assert got.casts == {"v": [("a", "b")]} and got.memory["v"] == pytest.approx(4.8)


def test_two_kinds_meet_in_each_bucket_by_hand():
    """The fast kind has b's gradient at 5 and a's at 6, the slow one at 10 and 12.

    Bucket b runs from 10 to 14 (4 s of the fast kind's link, 1 s of the slow one's), bucket a from
    14 to 16.
    """
    graph = Graph((node("a"), node("b")), ((("b",), 4), (("a",), 1)))
    slow_nodes = (node("a", (), 3, 2), node("b", (), 3, 4))
    slow = Graph(slow_nodes, ((("b",), 1), (("a",), 2)))
    fast = dataclasses.replace(graph, nodes=(node("a", (), 1, 1), node("b", (), 2, 2)))
    both = dict.fromkeys("ab", "float32")
    assert replay({"fast": fast, "slow": slow}, {"fast": both, "slow": both}).step_s == 16


def test_the_end_may_be_a_kind_without_its_bucket_by_hand():
    """The bucket ends at 4; the first node's backward pass ends at 12."""
    graph = Graph((node("a", (), 0, 9), node("b")), ((("b",), 1),))
    assert replay({"v": graph}, {"v": dict.fromkeys("ab", "float32")}).step_s == 12


def test_nodes_without_a_choice_follow_their_widest_input_by_hand():
    """The sum reads float16 (l) and bfloat16 (r): it is bfloat16 and casts l; the root is float32,
    and both products cast it. Casts cost 1 s: 3 a pass, so 6 s beside 5 nodes of 0 s.
    """
    nodes = (
        node("root", (), 0, 0, free=False),
        node("l", ("root",), 0, 0),
        node("r", ("root",), 0, 0),
        node("sum", ("l", "r", "l"), 0, 0, free=False),
        node("out", ("sum",), 0, 0, free=False),
    )
    got = replay({"v": Graph(nodes, (), (0, 1))}, {"v": {"l": "float16", "r": "bfloat16"}})
    assert got.step_s == 6
    assert got.casts == {"v": [("root", "l"), ("root", "r"), ("l", "sum")]}
    assert got.memory["v"] == pytest.approx(4 * (1 + 0.6 + 0.8 + 0.8 + 0.8))


def random_graph(rng, nodes, buckets, names=None):
    made = []
    for i in range(nodes):
        inputs = tuple(sorted(rng.sample(range(i), rng.randint(0, min(i, 3)))))
        table = [{p: rng.random() for p in ORDER} for _ in range(4)]
        made.append(
            Node(
                f"n{i}",
                tuple(f"n{j}" for j in inputs),
                table[0],
                table[1],
                rng.randint(1, 9),
                table[2],
                table[3] if rng.random() < 0.7 else None,
            )
        )
    sent = []
    for _ in range(buckets):
        held = rng.sample(range(nodes), rng.randint(1, min(nodes, 3)))
        sent.append((tuple(f"n{i}" for i in held), rng.random() * 2))
    return Graph(tuple(made), tuple(sent), (rng.random() / 20, rng.random() / 5))


def by_events(graphs, chosen):
    """Returns the end of a step: each kind is a process that posts the end of its next piece of
    work, the network one that starts a bucket when all gradients have been posted."""
    rows, work = {}, {}
    for kind, graph in graphs.items():
        row = rows[kind] = {}
        for n in graph.nodes:
            widest = [p for p in reversed(ORDER) if p in {row[i] for i in n.inputs}]
            row[n.name] = chosen[kind][n.name] if n.omega else (widest or ["float32"])[0]
        passes = [("forward_s", n) for n in graph.nodes]
        passes += [("backward_s", n) for n in reversed(graph.nodes)]
        work[kind] = []
        for key, n in passes:
            for i in n.inputs:
                if row[i] != row[n.name]:
                    source = next(m for m in graph.nodes if m.name == i)
                    work[kind].append((graph.cast_s[0] * source.elements + graph.cast_s[1], None))
            done = (kind, n.name) if key == "backward_s" else None
            work[kind].append((getattr(n, key)[row[n.name]], done))
    queue = [(0.0, kind, None) for kind in graphs]
    gradients, sent, busy, now = set(), 0, False, 0.0
    buckets = list(zip(*(g.buckets for g in graphs.values()), strict=True))
    while queue:
        now, who, done = heapq.heappop(queue)
        gradients |= {done} - {None}
        if who == "~network":
            busy, sent = False, sent + 1
        elif work[who]:
            seconds, done = work[who].pop(0)
            heapq.heappush(queue, (now + seconds, who, done))
        if not busy and sent < len(buckets):
            members = zip(graphs, buckets[sent], strict=True)
            needed = {(kind, name) for kind, (names, _) in members for name in names}
            if needed <= gradients:
                busy = True
                seconds = max(s for _, s in buckets[sent])
                heapq.heappush(queue, (now + seconds, "~network", None))
    return now


@pytest.mark.parametrize("case", range(60))
def test_a_step_ends_when_a_queue_of_events_is_empty(case):
    rng = random.Random(case)
    buckets = rng.randint(0, 4)
    kinds = [f"k{k}" for k in range(rng.randint(1, 3))]
    graphs = {kind: random_graph(rng, rng.randint(1, 9), buckets) for kind in kinds}
    chosen = {
        kind: {n.name: rng.choice(ORDER) for n in graph.nodes if n.omega}
        for kind, graph in graphs.items()
    }
    assert replay(graphs, chosen).step_s == pytest.approx(by_events(graphs, chosen), rel=1e-12)


A = node("a", precisions=("int8", "float32"))
FIXED = dataclasses.replace(node("r", ("a",), precisions=("float32",)), omega=None)


@pytest.mark.parametrize(
    "words, make",
    [
        ("no earlier node", lambda: Graph((node("a", ("b",)), node("b")))),
        ("two nodes", lambda: Graph((A, A))),
        ("bucket has the gradient of b", lambda: Graph((A,), ((("b",), 1),))),
        ("cast_s", lambda: Graph((A,), (), (-1, 0))),
        (
            "int9.*Did you mean int8",
            lambda: node("a", precisions=("int8",)) and Node("a", (), {"int9": 1}, {}, 1, {}),
        ),
        ("omega allows", lambda: Node("a", (), {}, {}, 1, {}, {"int8": 1})),
        ("at least 0", lambda: Node("a", (), {"int8": float("nan")}, {}, 1, {})),
        ("lack kind v", lambda: replay({"v": Graph((A,))}, {})),
        ("too many: kind w", lambda: replay({"v": Graph((A,))}, {"v": {"a": "int8"}, "w": {}})),
        ("no precision is given for a", lambda: replay({"v": Graph((A,))}, {"v": {}})),
        ("fp8.*int8, float32", lambda: replay({"v": Graph((A,))}, {"v": {"a": "fp8"}})),
        ("no node b", lambda: replay({"v": Graph((A,))}, {"v": {"a": "int8", "b": "int8"}})),
        (
            "widest input's int8",
            lambda: replay({"v": Graph((A, FIXED))}, {"v": {"a": "int8", "r": "float32"}}),
        ),
        (
            "r has no forward_s in int8",
            lambda: replay({"v": Graph((A, FIXED))}, {"v": {"a": "int8"}}),
        ),
        (
            "numbers differ",
            lambda: replay(
                {"v": Graph((A,)), "w": Graph((A,), ((("a",), 1),))}, {"v": {}, "w": {}}
            ),
        ),
        ("at least one kind", lambda: replay({}, {})),
    ],
)
def test_what_does_not_fit_is_refused_by_name(words, make):
    with pytest.raises(UserError, match=words):
        make()
