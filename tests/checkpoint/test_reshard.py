"""Any mesh to any mesh: the same bits, each byte read about once, at most a quarter more memory."""

import ctypes
import gc
import math
import zlib

import jax
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import orbax_io
from megajax.checkpoint.manager import CheckpointManager

MESHES = [(1,), (2,), (4, 2), (2, 4), (8, 1), (2, 2, 2)]
SHAPES = {"w": (512, 256), "experts": (16, 64, 128), "flat": (1 << 16,), "odd": (7, 32, 512)}


def make_mesh(sizes):
    devices = np.array(jax.devices()[: math.prod(sizes)])
    return Mesh(devices.reshape(sizes), ("p", "q", "r")[: len(sizes)])


def random_spec(random, shape, mesh):
    """Gives each mesh axis to a random dimension that it divides, or to none."""
    cuts = [[] for _ in shape]
    for axis in random.permutation(mesh.axis_names):
        d = int(random.integers(0, len(shape) + 1))
        if d < len(shape):
            ways = math.prod(mesh.shape[a] for a in cuts[d]) * mesh.shape[axis]
            if shape[d] % ways == 0:
                cuts[d].append(str(axis))
    return P(*(tuple(c) or None for c in cuts))


def shardings(mesh, seed):
    random = np.random.default_rng(seed)
    return {n: NamedSharding(mesh, random_spec(random, s, mesh)) for n, s in SHAPES.items()}


def values():
    random = np.random.default_rng(0)
    return {n: random.standard_normal(s, np.float32) for n, s in SHAPES.items()}


def bytes_read():
    metrics = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(m["values"][0]["value"] for m in metrics)


# Three rows of the matrix are enough for every day; the others, 36 pairs in all, are slow.
@pytest.mark.parametrize(
    "source",
    [m if i % 2 == 0 else pytest.param(m, marks=pytest.mark.slow) for i, m in enumerate(MESHES)],
    ids=str,
)
def test_any_mesh_to_any_mesh(source, tmp_path):
    state, mesh = values(), make_mesh(source)
    total = sum(x.nbytes for x in state.values())
    seed = zlib.crc32(str(source).encode())
    cut = {n: jax.device_put(state[n], s) for n, s in shardings(mesh, seed).items()}
    manager = CheckpointManager(tmp_path, verify="fast")  # the comparison here is bit for bit
    manager.save(1, cut).result()
    manager.close()  # its reading back would count below
    for target in MESHES:
        abstract = {
            n: jax.ShapeDtypeStruct(SHAPES[n], np.float32, sharding=s)
            for n, s in shardings(make_mesh(target), seed + len(target) + target[0]).items()
        }
        before = bytes_read()
        restored = manager.restore(1, like=abstract)
        assert (bytes_read() - before) / total <= 1.1, target
        for name, x in state.items():
            assert restored[name].sharding == abstract[name].sharding
            assert np.asarray(restored[name]).tobytes() == x.tobytes(), (target, name)


@pytest.mark.parametrize("partial", [False, True])
def test_leaves_that_match_no_chunk_come_back_in_whole_and_in_part(tmp_path, partial):
    """Stored along the first dimension, wanted along the last: every shard wants every chunk."""
    random = np.random.default_rng(0)
    state = {n: jax.device_put(random.standard_normal((16, 64, 128), np.float32)) for n in "abc"}
    manager = CheckpointManager(tmp_path)
    manager.save(1, state).result()
    cut = NamedSharding(make_mesh((8, 1)), P(None, None, "p"))
    names = "ab" if partial else "abc"
    like = {n: jax.ShapeDtypeStruct((16, 64, 128), np.float32, sharding=cut) for n in names}
    assert orbax_io.aligned(like["a"], orbax_io.stored_chunks(tmp_path / "1")["a"]) is not None
    restored = manager.restore(1, like=like, partial=partial)
    for name in names:
        assert restored[name].sharding == cut
        assert np.asarray(restored[name]).tobytes() == np.asarray(state[name]).tobytes()


def peak_kb():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]), int(fields["VmRSS"].split()[0])


@pytest.mark.slow  # alone in a process: other tests' threads count too
def test_memory_is_that_of_the_state(tmp_path):
    """201 MB as 12 leaves, after 6 MB that start programs and threads; unbounded: 1.9 times."""
    source, target = make_mesh((4, 2)), make_mesh((2, 4))
    cut = NamedSharding(source, P("p", "q"))

    def restored(n):
        manager, shape = CheckpointManager(tmp_path / str(n), verify="full"), (n // 1024, 1024)
        like = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(target, P("q", "p")))
        return manager, shape, {f"x{i}": like for i in range(12)}

    for n in (1 << 17, 1 << 22):
        manager, shape, _ = restored(n)
        place = jax.jit(lambda k, s=shape: jax.numpy.full(s, k, "float32"), out_shardings=cut)
        manager.save(1, {f"x{i}": place(float(i)) for i in range(12)}).result()
    manager, _, like = restored(1 << 17)
    manager.restore(1, like=like)
    manager, _, like = restored(1 << 22)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free would be used again, unseen
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark begins anew
    _, before = peak_kb()
    state = manager.restore(1, like=like)
    used = (peak_kb()[0] - before) * 1024
    assert all((np.asarray(state[f"x{i}"]) == i).all() for i in range(12))
    assert 0.95 <= used / (12 * 4 << 22) <= 1.25
