"""Read plans against a count of chunks, element by element."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import reads
from megajax.core.boxes import Box


def touched(shape, chunk, box):
    """Elements of all chunks that hold an element of the box."""
    owner = {p: tuple(np.floor_divide(p, chunk).tolist()) for p in np.ndindex(*shape)}
    held = {owner[p] for p in owner if inside(p, box)}
    return sum(o in held for o in owner.values())


def inside(place, box):
    return all(a <= i < b for i, a, b in zip(place, box.start, box.stop, strict=True))


def test_amplification_counts_whole_chunks(seed):
    random = np.random.default_rng(seed)
    for _ in range(10):
        shape = tuple(random.integers(1, 7, 3).tolist())
        chunk = tuple(int(random.integers(1, n + 1)) for n in shape)
        start = [int(random.integers(0, n)) for n in shape]
        stop = [int(random.integers(a + 1, n + 1)) for a, n in zip(start, shape, strict=True)]
        box = Box(tuple(start), tuple(stop))
        expected = touched(shape, chunk, box) / box.size
        assert reads.amplification(shape, chunk, [box]) == pytest.approx(expected)


def test_aligned_reads_touch_each_chunk_once():
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    changed = 0
    for chunk in ((16, 16, 16), (2, 64, 32), (16, 8, 128), (4, 32, 32)):
        for spec in (P("a"), P(None, ("a", "b")), P(("a", "b")), P("b", None, "a"), P()):
            shape = (16, 64, 128)
            like = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
            way = reads.aligned(like, chunk)
            changed += way is not None
            sharding = way or like.sharding
            boxes = {Box.of(i, shape) for i in sharding.devices_indices_map(shape).values()}
            assert reads.amplification(shape, chunk, list(boxes)) <= reads.TOLERANCE
            assert sum(b.size for b in boxes) == math.prod(shape)
    assert changed > 3


def test_what_would_take_too_much_memory_is_read_as_wanted():
    mesh = jax.make_mesh((8,), ("a",))
    like = jax.ShapeDtypeStruct((64, 3), np.float32, sharding=NamedSharding(mesh, P("a")))
    assert reads.aligned(like, (64, 3)) is None  # one chunk: it would be whole on every device


def test_groups_are_small():
    sizes = [3, 4, 5, 90, 1, 1]
    found = list(reads.groups(sizes, 100))
    assert list(itertools.chain(*found)) == list(range(6))
    assert all(len(g) == 1 or sum(sizes[i] for i in g) <= 10 for g in found)
    assert list(reads.groups([], 10)) == []
