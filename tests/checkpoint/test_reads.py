"""Read plans against a count of chunks, element by element."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import orbax_io
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.trust import CheckpointError
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
        assert orbax_io.amplification(shape, chunk, [box]) == pytest.approx(expected)


def test_aligned_reads_touch_each_chunk_once():
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    changed = 0
    for chunk in ((16, 16, 16), (2, 64, 32), (16, 8, 128), (4, 32, 32)):
        for spec in (P("a"), P(None, ("a", "b")), P(("a", "b")), P("b", None, "a"), P()):
            shape = (16, 64, 128)
            like = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
            cut = orbax_io.aligned(like, chunk)
            changed += cut is not None
            sharding = cut or like.sharding
            boxes = {Box.of(i, shape) for i in sharding.devices_indices_map(shape).values()}
            assert orbax_io.amplification(shape, chunk, list(boxes)) <= orbax_io.TOLERANCE
            assert sum(b.size for b in boxes) == math.prod(shape)
    assert changed > 3


def test_what_would_take_too_much_memory_is_read_as_wanted():
    mesh = jax.make_mesh((8,), ("a",))
    like = jax.ShapeDtypeStruct((64, 3), np.float32, sharding=NamedSharding(mesh, P("a")))
    assert orbax_io.aligned(like, (64, 3)) is None  # one chunk: it would be whole on every device


def test_pieces_hold_every_wanted_element_and_no_chunk_twice(seed):
    random = np.random.default_rng(seed)
    for _ in range(20):
        shape = tuple(random.integers(1, 9, int(random.integers(0, 4))).tolist())
        chunk = tuple(int(random.integers(1, n + 1)) for n in shape)
        boxes = []
        for _ in range(int(random.integers(1, 5))):
            start = [int(random.integers(0, n)) for n in shape]
            stop = [int(random.integers(a + 1, n + 1)) for a, n in zip(start, shape, strict=True)]
            boxes.append(Box(tuple(start), tuple(stop)))
        limit = int(random.integers(1, 40))
        reads = list(orbax_io.pieces(shape, chunk, boxes, limit))
        owners = {}
        for number, (box, numbers) in enumerate(reads):
            assert box.size <= max(limit, math.prod(chunk)) and numbers
            for place in (p for p in np.ndindex(*shape) if inside(p, box)):
                cell = tuple(np.floor_divide(place, chunk).tolist())
                assert owners.setdefault(cell, number) == number, "a chunk in two pieces"
                for i in numbers if len(numbers) == 1 else ():
                    assert inside(place, boxes[i]), "more than its only box"
        for i, box in enumerate(boxes):
            for place in (p for p in np.ndindex(*shape) if inside(p, box)):
                assert sum(inside(place, b) and i in numbers for b, numbers in reads) == 1


def test_a_read_for_another_shape_or_dtype_is_refused(tmp_path):
    manager = CheckpointManager(tmp_path, verify=None)
    manager.save(1, {"x": np.zeros((3, 4), np.float32)}).result()
    for other in (np.zeros((4, 3), np.float32), np.zeros((3, 4), np.int32)):
        with pytest.raises(CheckpointError, match="leaf x is float32"):
            manager.restore(1, like={"x": other})
