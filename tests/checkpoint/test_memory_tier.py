"""Copies in shared memory: killed writers, torn and damaged copies, other meshes."""

import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import agreement
from megajax.checkpoint.memory_tier import PAGE, MemoryTier, Piece, Segment
from megajax.checkpoint.trust import CheckpointError
from megajax.core.boxes import Box


@pytest.fixture
def segment(tmp_path):
    segment = Segment.create(tmp_path / "segment", 1 << 20)
    yield segment
    segment.close(remove=True)
    assert not (tmp_path / "segment").exists()


def pieces(step, n=3):
    random = np.random.default_rng(step)
    arrays = [random.standard_normal((40, 50), np.float32) for _ in range(n)]
    return [Piece(f"x{i}", a.shape, Box.of_shape(a.shape), a) for i, a in enumerate(arrays)]


def holds(segment, step):
    snapshot = segment.read()
    expected = pieces(step)
    return snapshot.step == step and all(
        a.name == b.name and np.array_equal(a.array, b.array)
        for a, b in zip(snapshot.pieces, expected, strict=True)
    )


def test_the_two_newest_are_there(segment):
    assert segment.steps() == []
    with pytest.raises(CheckpointError, match="no whole copy of a step; restore from storage"):
        segment.read()
    for step in (10, 20, 30, 5):  # 5: a run that went back
        segment.write(step, pieces(step), {"rows": step})
        assert holds(segment, step) and segment.read().data_state == {"rows": step}
    assert segment.steps() == [30, 5] and segment.read(30).step == 30
    with pytest.raises(CheckpointError, match="no whole copy of step 20"):
        segment.read(20)
    again = Segment(segment.path)  # as a new trainer finds it
    assert holds(again, 5)
    again.close()


def test_a_copy_without_its_checksum_counts_as_torn(segment):
    segment.write(1, pieces(1), {})
    seal = segment.copy(2, pieces(2), {})
    assert segment.steps() == [1] and holds(segment, 1)
    seal()
    assert segment.steps() == [1, 2] and holds(segment, 2)


class Dies(Exception):
    pass


def dies_at(array):
    """Stands in for np.ascontiguousarray until it is given this array; None: dies at once."""
    contiguous = np.ascontiguousarray

    def call(x, *more):
        if array is None or x is array:
            raise Dies
        return contiguous(x)

    return call


def test_a_copy_that_stops_anywhere_is_not_used(segment, monkeypatch):
    """The writer dies after each of the steps of a write."""
    for step in (1, 2):
        segment.write(step, pieces(step), {})

    for stop in range(4):
        bad = pieces(3)
        with monkeypatch.context() as patch:
            if stop < 3:
                patch.setattr(np, "ascontiguousarray", dies_at(bad[stop].array))
            else:
                patch.setattr(segment, "_crc", dies_at(None))
            with pytest.raises(Dies):
                segment.write(3, bad, {})
        assert segment.steps() == [2] and holds(segment, 2)
    segment.write(3, pieces(3), {})
    assert segment.steps() == [2, 3] and holds(segment, 3)


def test_damaged_memory_is_not_used(segment):
    for step in (1, 2):
        segment.write(step, pieces(step), {})
    memory, slot = segment._memory, 1  # step 2 lies in the second slot
    payload = 2 * PAGE + slot * segment.capacity
    for place in (*range(PAGE, PAGE + 48), payload + 3, payload + 1000, payload + 20_000):
        memory[place] ^= 16
        assert holds(segment, 1), place
        memory[place] ^= 16
        assert holds(segment, 2)


def test_too_much_is_refused(segment, tmp_path):
    segment.write(1, pieces(1), {})
    with pytest.raises(CheckpointError, match="step 2 takes .* bytes, a slot of .* has 1,048,576"):
        segment.write(2, pieces(2, n=200), {})
    assert holds(segment, 1)
    with pytest.raises(CheckpointError, match="exists"):
        Segment.create(segment.path, 100)
    with pytest.raises(CheckpointError, match="cannot keep"):
        Segment.create("/dev/shm/megajax_test_too_big", 1 << 50)
    with pytest.raises(CheckpointError, match="is no memory segment"):
        Segment(tmp_path / "nothing")


WRITER = """
    import sys
    import numpy as np
    from megajax.checkpoint.memory_tier import Piece, Segment
    from megajax.core.boxes import Box
    assert "jax" not in sys.modules  # an agent's half
    segment, step = Segment(sys.argv[1]), int(sys.argv[2])
    while True:
        a = np.full((400, 400), step, np.float32)
        segment.write(step, [Piece("x", a.shape, Box.of_shape(a.shape), a)], {"rows": step})
        print(step, flush=True)
        step += 1
"""


@pytest.mark.process
def test_kill_9_of_the_writer(segment, seed):
    random = np.random.default_rng(seed)
    last = 0
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), segment.path, str(last + 1)],
            stdout=subprocess.PIPE,
        )
        writer.stdout.readline()
        time.sleep(random.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        said = writer.communicate()[0].split()
        snapshot = segment.read()
        assert (snapshot.pieces[0].array == snapshot.step).all()
        assert snapshot.data_state == {"rows": snapshot.step}
        assert snapshot.step >= (int(said[-1]) if said else last + 1)
        last = snapshot.step
        del snapshot


def test_a_state_comes_back_on_any_mesh(tmp_path, caplog):
    random = np.random.default_rng(0)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    values = {
        "w": random.standard_normal((16, 24), np.float32),
        "half": np.asarray(jnp.asarray(random.standard_normal((8, 6)), jnp.bfloat16)),
        "step": np.int32(9),
    }
    cuts = {"w": P("a", "b"), "half": P("b"), "step": P()}
    state = {n: jax.device_put(x, NamedSharding(mesh, cuts[n])) for n, x in values.items()}
    tier = MemoryTier(tmp_path / "tier", 2)
    assert tier.take({}, None) is None
    tier.put(9, state, {"rows": 144})
    tier.wait()
    other = jax.make_mesh((2, 4), ("a", "b"))
    cuts = {"w": P("b", "a"), "half": P(None, "a"), "step": P()}
    like = {
        n: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=NamedSharding(other, cuts[n]))
        for n, x in values.items()
    }
    step, restored, data_state = MemoryTier(tmp_path / "tier", 3).take(like, 9)
    assert (step, data_state) == (9, {"rows": 144})
    assert MemoryTier(tmp_path / "tier", 3).take(like, 10) is None  # storage has a newer one
    for name, x in values.items():
        assert restored[name].sharding == like[name].sharding
        assert np.asarray(restored[name]).tobytes() == np.asarray(x).tobytes()
    like["w"] = jax.ShapeDtypeStruct((16, 25), np.float32, sharding=like["step"].sharding)
    caplog.set_level("WARNING")
    assert MemoryTier(tmp_path / "tier", 3).take(like, None) is None
    assert "step 9 in memory lacks part of leaf w" in caplog.text


def on_one(values):
    return {n: jax.device_put(x, jax.devices()[0]) for n, x in values.items()}


def test_what_all_processes_hold_is_taken(tmp_path, monkeypatch):
    """The other process is played: what steps, of which attempts, are in its two slots."""
    other = []

    def gather(values):
        words = np.array(values, np.int32)
        theirs = np.array(other, np.int32) if words.ndim == 2 else words
        return np.stack([words, theirs])

    monkeypatch.setattr(agreement, "tell", gather)
    state = on_one({"x": np.arange(6, dtype=np.float32)})
    none = (-1, -1)
    cases = [  # own (step, attempt), the other's, what is taken
        ([(10, 0), (20, 0)], [(10, 0), (20, 0)], 20),
        ([(10, 0), (20, 0)], [(20, 0), (30, 0)], 20),  # the other was quicker
        ([(10, 0), (20, 0)], [(10, 0), none], 10),  # the other's copy is torn
        ([(10, 0), (20, 0)], [none, none], None),  # a new host
        ([(20, 0), (20, 1)], [(20, 0), none], 20),
        ([(10, 1), (20, 1)], [(20, 0), (10, 0)], None),  # steps of another attempt
    ]
    for i, (first, second, expected) in enumerate(cases):
        for step, attempt in first:
            x = state["x"] + 100 * step + attempt
            tier = MemoryTier(tmp_path / f"{i}", attempt)
            tier.put(step, {"x": x}, {"rows": step})
            tier.wait()
        other[:] = second
        taken = MemoryTier(tmp_path / f"{i}", 2).take(state, None)
        assert (None if taken is None else taken[0]) == expected, i
        if taken is not None:
            attempt = min(a for s, a in first if s == expected)
            np.testing.assert_array_equal(
                taken[1]["x"], np.arange(6, dtype=np.float32) + 100 * expected + attempt
            )


def test_a_tier_grows_with_the_state_and_a_full_memory_is_said_once(tmp_path, caplog):
    tier = MemoryTier(tmp_path / "tier", 0)
    tier.put(1, on_one({"x": np.zeros(10)}), {})
    big = on_one({"x": np.zeros(10**5)})
    tier.put(2, big, {})
    tier.wait()
    assert MemoryTier(tmp_path / "tier", 1).take(big, None)[0] == 2
    caplog.set_level("WARNING")
    tier = MemoryTier(tmp_path / "nowhere" / "tier", 0)
    for step in (1, 2):
        tier.put(step, big, {})
    assert caplog.text.count("nothing is kept in memory: cannot keep") == 1


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(PAGE)])
def test_a_killed_creation_does_not_stop_the_next_attempt(tmp_path, caplog, content):
    path = tmp_path / "segment"
    path.write_bytes(content)
    tier = MemoryTier(path, attempt=1)
    assert "is no memory segment" in caplog.text and tier.take({}, None) is None
    tier.put(3, {"x": jnp.ones(3)}, {})
    tier.wait()
    assert Segment(path).steps() == [3]


def test_steps_beyond_31_bits_are_taken(tmp_path):
    state = {"x": jnp.arange(4.0)}
    tier = MemoryTier(tmp_path / "tier", 0)
    tier.put(2**31 + 5, state, {})
    tier.wait()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    taken = MemoryTier(tmp_path / "tier", 1).take(like, 2**31 + 4)
    assert taken is not None and taken[0] == 2**31 + 5
    assert MemoryTier(tmp_path / "tier", 1).take(like, 2**31 + 6) is None


@pytest.mark.parametrize("leaf", [np.arange(3), 3, jax.random.key(0)], ids=["host", "int", "key"])
def test_a_leaf_that_memory_does_not_keep_is_named(tmp_path, leaf):
    with pytest.raises(CheckpointError, match="leaf x is .*memory keeps arrays of devices"):
        MemoryTier(tmp_path / "tier", 0).put(1, {"x": leaf}, {})
