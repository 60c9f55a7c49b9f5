"""Boxes against arrays of element numbers: brute force says which elements lie where."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.boxes import Box, flat_boxes, grid, intersect


def random_box(random, shape):
    edges = [sorted(random.integers(0, n + 1, 2).tolist()) for n in shape]
    return Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_intersection_is_what_both_hold(rank, seed):
    random = np.random.default_rng(seed)
    for _ in range(30):
        shape = tuple(random.integers(1, 6, rank).tolist())
        numbers = np.arange(math.prod(shape)).reshape(shape)
        a, b = random_box(random, shape), random_box(random, shape)
        common = set(numbers[a.index()].ravel().tolist())
        common &= set(numbers[b.index()].ravel().tolist())
        box = a & b
        assert (set() if box is None else set(numbers[box.index()].ravel().tolist())) == common
        if box is not None:  # the same elements, seen from inside either holder
            for holder in (a, b):
                held = numbers[holder.index()]
                assert set(held[box.index(holder)].ravel().tolist()) == common
            assert box.size == len(common)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_copies_fill_every_target_from_any_cut(rank, seed):
    """Random uneven grids: each target element is written exactly once, with its own value."""
    random = np.random.default_rng(seed)
    for _ in range(15):
        shape = tuple(random.integers(1, 9, rank).tolist())
        numbers = np.arange(math.prod(shape)).reshape(shape)
        sources, targets = (
            grid(shape, [int(random.integers(1, n + 1)) for n in shape]) for _ in range(2)
        )
        held = [numbers[b.index()] for b in sources]
        filled = [np.full(b.shape, -1) for b in targets]
        for copy in intersect(sources, targets):
            assert copy.box.size > 0
            into = copy.box.index(targets[copy.target])
            assert (filled[copy.target][into] == -1).all()
            filled[copy.target][into] = held[copy.source][copy.box.index(sources[copy.source])]
        for box, memory in zip(targets, filled, strict=True):
            np.testing.assert_array_equal(memory, numbers[box.index()])


def test_nothing_to_copy():
    assert intersect([], [Box((0,), (1,))]) == [] == intersect([Box((0,), (1,))], [])
    empty = Box((2,), (2,))
    assert intersect([empty], [Box((0,), (4,))]) == [] and empty.size == 0


def test_grids_are_even():
    sizes = [b.size for b in grid((10,), (4,))]
    assert sum(sizes) == 10 and max(sizes) - min(sizes) <= 1
    assert grid((), ()) == [Box((), ())]


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 4), (5, 1, 3), (2, 3, 4), (1, 1, 1), (2, 2, 2, 3)]
)
def test_every_range_of_a_flat_array_is_a_few_boxes(shape):
    """All ranges: the boxes hold exactly begin..end, in order, once, and are few."""
    n = math.prod(shape)
    numbers = np.arange(n).reshape(shape)
    for begin in range(n + 1):
        for end in range(begin, n + 1):
            boxes = list(flat_boxes(begin, end, shape))
            held = [int(i) for b in boxes for i in numbers[b.index()].ravel()]
            assert held == list(range(begin, end))
            assert len(boxes) <= 2 * (max(len(shape), 1) - 1) + 1


def test_a_range_outside_is_refused():
    for begin, end in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="is not in an array of"):
            list(flat_boxes(begin, end, (2, 3)))


def test_a_box_is_what_jax_says_a_device_holds():
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, P("b", None, "a"))
    numbers = np.arange(6 * 3 * 8).reshape(6, 3, 8)
    for shard in jax.device_put(numbers.astype(np.int32), sharding).addressable_shards:
        box = Box.of(shard.index, numbers.shape)
        np.testing.assert_array_equal(numbers[box.index()], np.asarray(shard.data))
        assert box.shape == shard.data.shape
