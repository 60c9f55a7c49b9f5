"""The allocator against all plans of small graphs, and against what it promises of large ones."""

import dataclasses
import itertools
import json
import random

import pytest

from megajax.core.errors import UserError
from megajax.systems.qsync import Graph, Node, Precisions, allocate, replay

NARROW = ("int8", "float16", "float32")


def random_node(rng, name, inputs, free):
    """Seconds and bytes mostly fall with the width, omega always does."""
    wide = [1.0, 1.3 + rng.random(), 1.8 + 2 * rng.random()]
    if rng.random() < 0.2:
        wide[0] = 2.5  # no fast unit for int8
    omega = sorted((rng.random() * 10 ** rng.uniform(-6, 0) for _ in range(2)), reverse=True)
    forward, backward, saved = rng.random(), rng.random() * 2, rng.randint(1, 50)
    return Node(
        name,
        inputs,
        {p: forward * w for p, w in zip(NARROW, wide, strict=True)},
        {p: backward * w for p, w in zip(NARROW, wide, strict=True)},
        rng.randint(1, 9),
        {p: saved * w for p, w in zip(NARROW, (1, 2, 4), strict=True)},
        dict(zip(NARROW, (*omega, 0.0), strict=True)) if free else None,
    )


def random_graph(rng, free, buckets):
    """`free` nodes with a choice, and some without one between them, at most three inputs each."""
    count, nodes, left = free + rng.randint(0, free), [], free
    for i in range(count):
        is_free = left and (count - i <= left or rng.random() < 0.6)
        left -= bool(is_free)
        inputs = sorted(rng.sample(range(i), rng.randint(min(i, 1), min(i, 3))))
        nodes.append(random_node(rng, f"n{i}", tuple(f"n{j}" for j in inputs), is_free))
    sent = []
    for _ in range(buckets):
        names = rng.sample(range(count), rng.randint(1, min(count, 3)))
        sent.append((tuple(f"n{i}" for i in names), rng.random()))
    return Graph(tuple(nodes), tuple(sent), (rng.random() / 20, rng.random() / 10))


def omega(graphs, plan):
    return sum(
        n.omega[plan[kind][n.name]] for kind, g in graphs.items() for n in g.nodes if n.omega
    )


def all_plans(graph):
    """Yields (seconds until each bucket's gradients are there, until the end, bytes, omega)."""
    free = [n for n in graph.nodes if n.omega]
    for picked in itertools.product(*(n.omega for n in free)):
        row = dict(zip((n.name for n in free), picked, strict=True))
        cast, now, there = {}, 0.0, {}
        for n in graph.nodes:
            if not n.omega:
                wide = [row[i] for i in n.inputs]
                row[n.name] = max(wide, key=NARROW.index) if wide else "float32"
            elements = [
                g.elements for g in graph.nodes if g.name in n.inputs and row[g.name] != row[n.name]
            ]
            cast[n.name] = sum(graph.cast_s[0] * e + graph.cast_s[1] for e in elements)
            now += n.forward_s[row[n.name]] + cast[n.name]
        for n in reversed(graph.nodes):
            now = there[n.name] = now + n.backward_s[row[n.name]] + cast[n.name]
        ready = [max(there[name] for name in names) for names, _ in graph.buckets]
        saved = sum(n.saved_bytes[row[n.name]] for n in graph.nodes)
        yield ready, now, saved, sum(n.omega[row[n.name]] for n in free)


def best(graphs, memory):
    """Returns (the shortest step, the least omega), from all plans; None where none fits."""
    rows = [
        [plan for plan in all_plans(graph) if plan[2] <= memory[kind]]
        for kind, graph in graphs.items()
    ]
    slowest = [
        max(s for _, s in b) for b in zip(*(g.buckets for g in graphs.values()), strict=True)
    ]
    fits = []
    for plans in itertools.product(*rows):
        over = 0.0
        for j, seconds in enumerate(slowest):
            over = max(over, *(plan[0][j] for plan in plans)) + seconds
        fits.append((max(over, *(plan[1] for plan in plans)), sum(plan[3] for plan in plans)))
    if not fits:
        return None
    shortest = min(fits)[0]
    return shortest, min(lost for seconds, lost in fits if seconds <= shortest * (1 + 1e-9))


def limits(rng, graphs):
    """Somewhere between the bytes of the narrowest and of the widest plan, or a little below."""
    limits = {}
    for kind, graph in graphs.items():
        low, high = (sum(n.saved_bytes[p] for n in graph.nodes) for p in ("int8", "float32"))
        limits[kind] = low + rng.uniform(-0.05, 0.8) * (high - low)
    return limits


def uniform(graphs, precision):
    return {kind: {n.name: precision for n in g.nodes if n.omega} for kind, g in graphs.items()}


# Free nodes of each kind: 36 cases with all plans of both kinds together, one with 3^8 plans.
SIZES = [*([(1, 3), (2, 2), (4,), (3, 1), (2, 1, 1), (4,)] * 6), (8,)]


@pytest.mark.parametrize("case", range(len(SIZES)))
def test_exact_is_the_best_of_all_plans_and_greedy_no_slower_than_uniform(case):
    rng = random.Random(case)
    buckets = rng.randint(0, 3)
    graphs = {f"k{k}": random_graph(rng, n, buckets) for k, n in enumerate(SIZES[case])}
    devices, memory = dict.fromkeys(graphs, 2), limits(rng, graphs)
    expected = best(graphs, memory)
    if expected is None:
        with pytest.raises(UserError, match="memory"):
            allocate(graphs, devices, memory=memory, method="exact")
        return
    chosen = allocate(graphs, devices, memory=memory, method="exact")
    got = replay(graphs, chosen)
    assert all(got.memory[kind] <= memory[kind] for kind in graphs)
    assert got.step_s == pytest.approx(expected[0], rel=1e-9)
    assert omega(graphs, chosen) == pytest.approx(expected[1], rel=1e-9, abs=1e-15)
    assert chosen.gap == 0
    rough = allocate(graphs, devices, memory=memory)
    got = replay(graphs, rough)
    assert all(got.memory[kind] <= memory[kind] for kind in graphs)
    for precision in NARROW:
        rival = replay(graphs, uniform(graphs, precision))
        if all(rival.memory[kind] <= memory[kind] for kind in graphs):
            assert got.step_s <= rival.step_s


def layer_graph(layers, speed, rng):
    """A decoder: four products a layer, norms and sums without a choice, a bucket a layer."""
    nodes, sent, last = [], [], ()
    fast = {"int8": 4.0, "float16": 2.0, "float32": 1.0}

    def add(name, inputs, seconds, free):
        table = {p: seconds / speed[p] if free else seconds / fast[p] / 8 for p in speed}
        lost = {"int8": 1e-2, "float16": 1e-5, "float32": 0.0}
        weight = rng.uniform(0.5, 2)
        nodes.append(
            Node(
                name,
                inputs,
                table,
                {p: 2 * s for p, s in table.items()},
                1000,
                {p: 4096 / fast[p] for p in speed},
                {p: lost[p] * weight for p in speed} if free else None,
            )
        )
        return (name,)

    for i in range(layers):
        norm = add(f"norm{i}", last, 0.2, False)
        qkv = add(f"qkv{i}", norm, 3.0, True)
        attend = add(f"attend{i}", qkv, 0.7, False)
        out = add(f"out{i}", attend, 1.0, True)
        total = add(f"sum{i}", (*last, *out), 0.1, False)
        up = add(f"up{i}", total, 4.0, True)
        down = add(f"down{i}", up, 4.0, True)
        last = add(f"end{i}", (*total, *down), 0.1, False)
        sent.insert(0, ((f"qkv{i}", f"out{i}", f"up{i}", f"down{i}"), 1.0))
    return Graph(tuple(nodes), tuple(sent), (2e-5, 1e-3))


def cluster(layers, strong_speed=10.0, seed=0):
    weak = {"int8": 4.0, "float16": 2.0, "float32": 1.0}
    strong = {"float16": 2 * strong_speed, "float32": strong_speed}
    rng = random.Random(seed)
    return {"v100": layer_graph(layers, strong, rng), "t4": layer_graph(layers, weak, rng)}


@pytest.mark.parametrize("method", ["greedy", "exact"])
def test_strong_devices_stay_float32_beside_weak_ones(method):
    graphs = cluster(3)
    chosen = allocate(graphs, {"v100": 2, "t4": 2}, memory={}, method=method)
    assert set(chosen["v100"].values()) == {"float32"}
    assert "int8" in chosen["t4"].values()
    assert len(chosen["t4"]) == 12  # products alone


def test_more_memory_never_costs_precision_at_the_same_step():
    """Another kind bounds the step, so all plans have the same time."""
    slow = Graph((Node("a", (), {"float32": 500}, {"float32": 0}, 1, {"float32": 0}),), ())
    graphs = {"t4": dataclasses.replace(cluster(2)["t4"], buckets=()), "slow": slow}
    low, high = (replay(graphs, uniform(graphs, p)).memory["t4"] for p in ("int8", "float32"))
    lost = []
    for part in (0, 0.1, 0.3, 0.35, 0.7, 1):
        memory = {"t4": low + part * (high - low)}
        chosen = allocate(graphs, {"t4": 1, "slow": 1}, memory=memory, method="exact")
        assert replay(graphs, chosen).step_s == 500
        lost.append(omega(graphs, chosen))
    assert lost == sorted(lost, reverse=True) and lost[0] > lost[3] > lost[-1] == 0


def test_a_slower_strong_device_never_costs_precision():
    """The slower the strong devices are in their one precision, the later the weak ones may end."""
    lost = []
    for speed in (8.0, 2.0, 1.5, 0.5):
        graphs = cluster(2, speed)
        graphs["v100"] = with_one_precision(graphs["v100"])
        chosen = allocate(graphs, {"v100": 2, "t4": 2}, memory={}, method="exact")
        lost.append(omega({"t4": graphs["t4"]}, chosen))
    assert lost == sorted(lost, reverse=True) and lost[0] > lost[2] > lost[-1] == 0


def with_one_precision(graph):
    return dataclasses.replace(
        graph,
        nodes=tuple(
            dataclasses.replace(n, omega={"float32": 0.0} if n.omega else None) for n in graph.nodes
        ),
    )


def test_a_file_gives_back_what_was_saved_and_a_damaged_one_is_refused_by_name(tmp_path):
    path = tmp_path / "unlike.json"
    chosen = Precisions({"v100": {"a": "float32"}, "t4": {"a": "int8"}})
    chosen.save(path)
    assert Precisions.load(path) == chosen and Precisions.load(str(path))["t4"]["a"] == "int8"
    text = path.read_text()
    wrong = {
        "is not JSON": text[:-4],
        "no file of precisions": json.dumps({"model": 1}),
        "int9.*float32": text.replace("int8", "int9"),
        "damaged": text.replace('"a": "int8"', '"a": ["int8"]'),
        "at least one kind": json.dumps({**json.loads(text), "precisions": {}}),
        "kind 't4' has 'int8'": json.dumps({**json.loads(text), "precisions": {"t4": "int8"}}),
        "JSON object": "[1]",
        "comes twice": text.replace('"t4": {', '"t4": {}, "t4": {'),
        "INT8.*must be one of int8": text.replace('"int8"', '"INT8"'),
        "1 to 100 printable": text.replace("t4", "t4\\n"),
        "kind 'ttttt.* printable": text.replace("t4", "t" * 10_000),
        "no comma": text.replace("t4", "t4,v100"),
    }
    for words, content in wrong.items():
        path.write_text(content)
        with pytest.raises(UserError, match=words) as raised:
            Precisions.load(path)
        assert str(path) in str(raised.value)
    with pytest.raises(UserError, match="bytes"):
        path.write_bytes(b" " * (2**24 + 1))
        Precisions.load(path)
    with pytest.raises(UserError, match="cannot read"):
        Precisions.load(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot write"):
        chosen.save(tmp_path / "absent" / "unlike.json")


@pytest.mark.parametrize(
    "words, devices, options",
    [
        ("devices lacks kind t4", {"v100": 1}, {}),
        ("devices has kind t44.*Did you mean t4", {"v100": 1, "t4": 1, "t44": 1}, {}),
        ("at least 1", {"v100": 1, "t4": 0}, {}),
        ("memory has kind h100", {"v100": 1, "t4": 1}, {"memory": {"h100": 1}}),
        ("memory.*at least 0", {"v100": 1, "t4": 1}, {"memory": {"t4": -1}}),
        ("memory.*nearest", {"v100": 1, "t4": 1}, {"memory": {"t4": 10}}),
        ("'greedy' or 'exact'", {"v100": 1, "t4": 1}, {"method": "best"}),
    ],
)
def test_what_does_not_fit_is_refused(words, devices, options):
    with pytest.raises(UserError, match=words):
        allocate(cluster(1), devices, **{"memory": {}, **options})


def test_a_node_without_numbers_in_what_its_input_may_be_is_refused():
    graph = cluster(1)["t4"]
    nodes = [
        dataclasses.replace(n, saved_bytes={"float32": 1}) if n.name == "attend0" else n
        for n in graph.nodes
    ]
    with pytest.raises(UserError, match="attend0 may be int8.*saved_bytes"):
        allocate({"t4": Graph(tuple(nodes))}, {"t4": 1}, memory={})
