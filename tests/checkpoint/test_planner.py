"""Plans by brute force on small meshes; the 12,288 ranks of a 405B model by their sums."""

import math
import time

import numpy as np
import pytest

from megajax.checkpoint import planner
from megajax.checkpoint.planner import Leaf, PlanCache, Rates, plan, reads, simulate

MESH = {"pipe": 2, "data": 3, "tensor": 2}


def leaves():
    return [
        Leaf("w", (4, 6, 8), 4, (("pipe",), (), ("tensor",))),
        Leaf("moments", (4, 6, 8), 4, (("pipe",), ("data",), ("tensor",))),
        Leaf("tokens", (10, 6), 2, (("tensor",), ())),
        Leaf("uneven", (7, 5), 1, ((), ("data", "pipe"))),
        Leaf("norm", (6,), 4, ((),)),
        Leaf("step", (), 4, ()),
        Leaf("empty", (0, 3), 4, ((), ())),
    ]


def holders(leaf, box, mesh):
    """Ranks whose shard holds the box, from the definition of a cut."""
    boxes = []
    for rank, place in enumerate(np.ndindex(*mesh.values())):
        at = dict(zip(mesh, place, strict=True))
        inside = True
        for axes, n, a, b in zip(leaf.cuts, leaf.shape, box.start, box.stop, strict=True):
            ways, k = 1, 0
            for axis in axes:
                ways, k = ways * mesh[axis], k * mesh[axis] + at[axis]
            inside &= n * k // ways <= a and b <= n * (k + 1) // ways
        if inside:
            boxes.append(rank)
    return boxes


@pytest.mark.parametrize("mesh", [{"pipe": 1, "data": 1, "tensor": 1}, MESH, {**MESH, "data": 7}])
def test_every_byte_once_by_a_rank_that_has_it(mesh):
    save = plan(leaves(), mesh)
    written = {x.name: np.zeros(x.shape, int) for x in leaves()}
    for rank in range(save.ranks):
        for leaf, box in save.pieces(rank):
            written[leaf.name][box.index()] += 1
            assert rank in holders(leaf, box, mesh)
    for name, counts in written.items():
        assert (counts == 1).all(), name
    total = sum(math.prod(x.shape) * x.itemsize for x in leaves())
    assert save.bytes_per_rank.sum() == save.bytes.sum() == total
    for i in range(len(save.leaf)):
        leaf = save.leaves[save.leaf[i]]
        assert save.copies[i] == len(holders(leaf, save.box(i), mesh))


def test_a_load_takes_every_byte_once_from_any_save():
    saved = plan(leaves(), MESH)
    other = [Leaf(x.name, x.shape, x.itemsize, ((),) * len(x.shape)) for x in leaves()]
    other[0] = Leaf("w", (4, 6, 8), 4, ((), ("tensor",), ("data",)))
    load = plan(other, {"data": 4, "tensor": 2})
    numbers = [np.arange(math.prod(x.shape)).reshape(x.shape) for x in other]
    got = [np.full(x.shape, -1) for x in other]
    for leaf, copy in reads(saved, load):
        assert saved.leaf[copy.source] == load.leaf[copy.target] == leaf
        inside = saved.box(copy.source) & copy.box
        assert inside == copy.box == (load.box(copy.target) & copy.box)
        assert (got[leaf][copy.box.index()] == -1).all()
        got[leaf][copy.box.index()] = numbers[leaf][copy.box.index()]
    for a, b in zip(got, numbers, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="different leaves"):
        list(reads(saved, plan(other[1:], MESH)))


def llama_405b():
    """126 layers of Llama 3 405B with two moments; ZeRO-1 cuts the moments over data."""
    L, D, F, H, G, K, V = 126, 16384, 53248, 128, 8, 128, 128256
    shapes = {
        "query": ((L, D, H, K), (0, 2)),
        "key": ((L, D, G, K), (0, 2)),
        "value": ((L, D, G, K), (0, 2)),
        "out": ((L, H, K, D), (0, 1)),
        "gate": ((L, D, F), (0, 2)),
        "up": ((L, D, F), (0, 2)),
        "down": ((L, F, D), (0, 1)),
        "norms": ((L, 2, D), (0, None)),
        "tokens": ((V, D), (None, 0)),
        "head": ((D, V), (None, 1)),
    }
    boxes = []
    for prefix in ("params", "mu", "nu"):
        for name, (shape, (pipe, tensor)) in shapes.items():
            cuts = [[] for _ in shape]
            if pipe is not None:
                cuts[pipe].append("pipe")
            if tensor is not None:
                cuts[tensor].append("tensor")
            if prefix != "params" and name != "norms":
                wide = max(range(len(shape)), key=lambda d: shape[d] * (not cuts[d]))
                cuts[wide].append("data")
            boxes.append(Leaf(f"{prefix}.{name}", shape, 4, tuple(map(tuple, cuts))))
    return boxes


@pytest.mark.parametrize("data", [6, pytest.param(96, marks=pytest.mark.slow)])
def test_405b_parameters(data):
    """On 768 ranks, and on 12,288."""
    mesh = {"pipe": 16, "data": data, "tensor": 8}
    cache = PlanCache()
    began = time.perf_counter()
    save = cache.plan(llama_405b(), mesh)
    first = time.perf_counter() - began
    began = time.perf_counter()
    assert cache.plan(llama_405b(), mesh) is save
    second = time.perf_counter() - began
    total = sum(math.prod(x.shape) * x.itemsize for x in save.leaves)
    assert save.ranks == 128 * data and 4.8e12 < total < 4.9e12  # 405B of three float32
    assert first <= 60 and second < 1 and save.imbalance <= 1.05
    assert save.bytes_per_rank.sum() == total and save.metadata_bytes < 100e6
    assert 0 < simulate(save).stall < simulate(save).save


def test_estimates_follow_the_slowest():
    leaf = [Leaf("x", (800,), 1, (("a",),))]
    save = plan(leaf, {"a": 8})
    rates = Rates(100.0, 50.0, 1e9, 1e9, ranks_per_host=4)
    estimate = simulate(save, rates)
    assert estimate.stall == 1.0 and estimate.save == 1.0 + 400 / 50
    assert simulate(save, Rates(100.0, 50.0, 10.0, 1e9, 4)).save == 1.0 + 80
    copies = plan([Leaf("x", (800,), 1, ((),))], {"a": 8})
    assert copies.broadcast_bytes == 7 * 800 and copies.imbalance <= 1 + 1 / planner.PIECES


def test_the_cache_forgets_what_was_used_longest_ago():
    made = []

    def make(leaves, mesh):
        made.append(mesh["a"])
        return plan(leaves, mesh)

    cache = PlanCache(2, make)
    for size in (1, 2, 1, 3, 1, 2):
        cache.plan([Leaf("x", (4,), 1, ((),))], {"a": size})
    assert made == [1, 2, 3, 2]


def test_bad_cuts_are_refused():
    for cuts in ((("a",), ("a",)), (("b",), ()), (("a",),)):
        with pytest.raises(ValueError, match="x of 2 dimensions is cut by"):
            plan([Leaf("x", (4, 4), 1, cuts)], {"a": 2})
