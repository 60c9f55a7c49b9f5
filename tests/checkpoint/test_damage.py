"""Damage of every kind to every file of a step: an error that names it, or the right bytes."""

import itertools
import logging
import os
import shutil
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import sealing, trust
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.store import SaveError
from megajax.checkpoint.trust import CheckpointError, DamagedError


def tree(step):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    random = np.random.default_rng(step)
    cut, part = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P("b"))
    return {
        "block": {"w": jax.device_put(random.standard_normal((128, 256), np.float32), cut)},
        "bits": jax.device_put(random.integers(0, 2**32, (64,), np.uint32), part),
        "half": jnp.asarray(random.standard_normal((3, 700)), jnp.bfloat16),
        "count": jnp.int32(step),
        "none": jnp.zeros((0, 4)),
    }


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Steps 1 and 2, whole."""
    folder = tmp_path_factory.mktemp("stored")
    manager = CheckpointManager(folder)
    for step in (1, 2):
        manager.save(step, tree(step), data_state={"rows": step}).result()
    return folder


@pytest.fixture
def folder(stored, tmp_path):
    shutil.copytree(stored, tmp_path / "c")
    return tmp_path / "c"


def flip_once(monkeypatch):
    """Flips a bit of the next step's largest file between the write and the checksum."""
    summed = trust.sum_files

    def flip(folder, names, sizes=None, *more):
        if sizes is None:
            monkeypatch.undo()
            path = max((folder / n for n in names), key=lambda p: p.stat().st_size)
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 2)
                bits = file.read(1)[0] ^ 1
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([bits]))
        return summed(folder, names, sizes, *more)

    monkeypatch.setattr(trust, "sum_files", flip)


def test_a_bit_that_flips_before_its_checksum_costs_no_older_step(tmp_path, monkeypatch, caplog):
    """The files' checksums seal it in; the step counts until it is read back."""
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, tree(1)).result()
    flip_once(monkeypatch)
    manager.save(2, tree(2))
    with pytest.raises(SaveError, match=r"step 2 .* not what was written: leaf block.w; storage"):
        manager.close()
    assert "step 2 of" in caplog.text and "does not count any more" in caplog.text
    assert manager.steps() == [1, 2] and manager.latest() == 1 and manager.refuted() == [2]
    later = CheckpointManager(tmp_path, keep=1)  # as a later process finds it
    assert later.latest() == 1 and same(later.restore(like=like(tree(1))), tree(1))
    for look in (lambda: later.restore(2, like=like(tree(2))), lambda: later.verify(2)):
        with pytest.raises(DamagedError, match="step 2 .*leaf block.w"):
            look()
    later.save(3, tree(3)).result()
    assert later.steps() == [3] and same(later.restore(like=like(tree(3))), tree(3))


def test_what_looks_wrong_once_is_read_again(tmp_path, monkeypatch):
    folder, away, wrong_parts = tmp_path / "1", tmp_path / "away", sealing.wrong_parts
    said = []

    def meanwhile(*share):
        if not said:  # as NFS does with files that another host has just written
            folder.rename(away)
            (tmp_path / "1").mkdir()
        said.append(wrong_parts(*share))
        if len(said) == 1:
            folder.rmdir()
            away.rename(folder)
        return said[-1]

    monkeypatch.setattr(sealing, "wrong_parts", meanwhile)
    manager = CheckpointManager(tmp_path)
    manager.save(1, tree(1)).finish()
    assert said[0] and said[1:] == [[]] and manager.latest() == 1
    assert same(CheckpointManager(tmp_path).restore(like=like(tree(1))), tree(1))


def test_a_step_that_a_kill_kept_from_being_read_back(tmp_path, monkeypatch):
    """It can be restored and lets none go; the next save reads it back before its own counts."""
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, tree(1)).result()
    manager.close()
    for step, flips in ((2, False), (3, True)):
        if flips:
            flip_once(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(sealing.Sealer, "check", lambda self, step, number: None)
            manager.save(step, tree(step)).result()
            manager.close()
        again = CheckpointManager(tmp_path, keep=1)
        assert again.latest() == step
        assert again.steps() == ([1, 2] if step == 2 else [2, 3])
        if not flips:
            assert same(again.restore(like=like(tree(2))), tree(2))
            again.save(2, tree(2)).result()  # the same step: the copy that goes is not read
            assert again.steps() == [2]
    read, wrong_parts = [], sealing.wrong_parts
    monkeypatch.setattr(
        sealing, "wrong_parts", lambda at, *more: read.append(at.name) or wrong_parts(at, *more)
    )
    again.save(4, tree(4)).result()
    assert again.steps() == [4] and read == ["3", "3", "4"]  # what is wrong is read twice


@pytest.mark.parametrize("compression", ["none", pytest.param("zstd", marks=pytest.mark.slow)])
def test_what_is_read_back_has_the_devices_fingerprints(tmp_path, monkeypatch, compression):
    """Every type and shape, in slabs and blocks that do not divide them."""
    monkeypatch.setattr(sealing, "SLAB", 2**11)
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (5, 7, 64), np.uint8)
    state = {
        kind: raw.reshape(5, -1).view(np.dtype(getattr(ml_dtypes, kind, kind)))
        for kind in ("int8", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn")
    }
    state |= {"bool": raw > 127, "int4": (raw % 8).astype(ml_dtypes.int4)}
    state |= {"scalar": jnp.float32(3), "none": np.zeros((3, 0)), "long": np.arange(300_000)}
    state["devices"] = tree(0)
    CheckpointManager(tmp_path, compression=compression).save(1, state).result()
    record = trust.read_record(tmp_path / "1")
    assert [sealing.wrong_parts(tmp_path / "1", record, i, 3) for i in range(3)] == [[]] * 3
    others = {
        n: replace(x, fingerprint=[x.fingerprint[0] ^ 1, x.fingerprint[1]])
        for n, x in record.leaves.items()
    }
    parts = [
        sealing.wrong_parts(tmp_path / "1", replace(record, leaves=others), i, 3) for i in range(3)
    ]
    assert all(parts) and sorted(sum(parts, [])) == sorted(f"leaf {n}" for n in others)


def files(step):
    return [*trust.list_files(step), trust.RECORD]


def outcome(folder, good, places):
    """Restores step 2 of a damaged folder; 'right', 'named', or what went wrong."""
    manager = CheckpointManager(folder)
    try:
        rows = manager.data_state(2)["rows"]
        restored = manager.restore(2, like=like(good))
    except CheckpointError as error:
        text = str(error)
        return "named" if "step 2" in text and any(p in text for p in places) else text
    return "right" if same(restored, good) and rows == 2 else "loaded and different"


def flips(size, seed):
    """Some places of a file: both ends, and others drawn from the name."""
    random = np.random.default_rng(seed)
    return sorted({0, size // 2, size - 1, *random.integers(0, size, 2).tolist()}) if size else []


def test_one_flipped_bit_anywhere(folder):
    good, step = tree(2), folder / "2"
    named = 0
    for name in files(step):
        content = (step / name).read_bytes()
        for place in flips(len(content), zlib.crc32(name.encode())):
            bad = bytearray(content)
            bad[place] ^= 1 << place % 8
            (step / name).write_bytes(bad)
            result = outcome(folder, good, [name])
            assert result in ("right", "named"), (name, place, result)
            named += result == "named"
        (step / name).write_bytes(content)
    assert named > 30 and outcome(folder, good, []) == "right"


def test_truncation_growth_and_deletion(folder):
    good, step = tree(2), folder / "2"
    for name in files(step):
        content = (step / name).read_bytes()
        for bad in {content[: len(content) // 2], content[:-1], b"", content + b"junk"} - {content}:
            (step / name).write_bytes(bad)
            result = outcome(folder, good, [name])
            assert result in ("right", "named"), (name, len(bad), result)
        (step / name).unlink()
        result = outcome(folder, good, [name])
        assert result == "named", (name, result)
        (step / name).write_bytes(content)


def test_swapped_files(folder):
    good, step = tree(2), folder / "2"
    for a, b in itertools.combinations(files(step), 2):
        if (step / a).read_bytes() == (step / b).read_bytes():
            continue
        exchange(step / a, step / b)
        result = outcome(folder, good, [a, b])
        assert result in ("right", "named"), (a, b, result)
        exchange(step / a, step / b)
    exchange(folder / "1", folder / "2")  # whole steps
    with pytest.raises(DamagedError, match="step 2 of .* holds step 1"):
        CheckpointManager(folder).restore(2, like=like(good))


def exchange(a, b):
    a.rename(a.with_name("between"))
    b.rename(a)
    a.with_name("between").rename(b)


def data_file(step):
    return max(trust.list_files(step), key=lambda n: (step / n).stat().st_size)


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_a_damaged_array_is_named_and_the_step_before_is_taken(folder, caplog):
    step, name = folder / "2", data_file(folder / "2")
    inside = next(
        (file, begin) for leaf, file, begin, _ in trust.stored_values(step) if leaf == "block.w"
    )
    assert inside[0] == name
    flip(step / name, inside[1] + 100)
    manager = CheckpointManager(folder)
    assert manager.latest() == 2  # its record is whole; arrays are not read
    with caplog.at_level(logging.ERROR, "absl"):
        for _ in range(2):
            restored = manager.restore(like=like(tree(1)))
            assert same(restored, tree(1)) and manager.latest() == 1
    assert caplog.text.count("step 2 of") == 1
    for words in ("is damaged", name, "leaf block.w", "restore another step"):
        assert words in caplog.text
    with pytest.raises(DamagedError, match=f"{name}: bytes 0..[0-9]+ are not .*leaf block.w"):
        manager.restore(2, like=like(tree(2)))
    with pytest.raises(DamagedError, match="leaf block.w"):
        CheckpointManager(folder).verify(2)
    manager.verify(1)
    flip(folder / "1" / trust.RECORD, 40)
    with pytest.raises(CheckpointError, match=r"has no good checkpoint; damaged: \[1, 2\]"):
        manager.restore(like=like(tree(1)))


def test_less_checking_when_asked(folder):
    """Fast sees what small files and sizes show; nothing checked means Orbax's own answer."""
    flip(folder / "2" / data_file(folder / "2"), 5000)
    for verify in ("fast", None):
        restored = CheckpointManager(folder, verify=verify).restore(2, like=like(tree(2)))
        assert not same(restored, tree(2))  # what the default saves us from
    (folder / "2" / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(DamagedError):
        CheckpointManager(folder, verify="fast").restore(2, like=like(tree(2)))


def test_a_step_of_plain_orbax_restores(tmp_path):
    import orbax.checkpoint.experimental.v1 as ocp

    state = {k: v for k, v in tree(3).items() if k != "none"}
    ocp.save(str(tmp_path / "3"), state, custom_metadata={"rows": 3})
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == 3 and manager.data_state(3) == {"rows": 3}
    assert same(manager.restore(like=like(state)), state)
    with pytest.raises(CheckpointError, match="step 3 .* has no integrity record: plain Orbax"):
        manager.verify(3)
    manager.save(4, tree(4)).result()  # ours beside it; plain Orbax reads that too
    expected = {k: v for k, v in tree(4).items() if k != "none"}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        assert same(ocp.load(str(tmp_path / "4"), like(expected)), expected)


def test_a_long_file_is_summed_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "CHUNK", 1000)
    data = os.urandom(3500)
    (tmp_path / "f").write_bytes(data)
    sums = trust.sum_files(tmp_path, ["f"])
    assert sums["f"].crc32 == [zlib.crc32(data[i : i + 1000]) for i in range(0, 3500, 1000)]
    record = trust.Record(1, sums, {})
    flip(tmp_path / "f", 2345)
    damage = trust.find_damage(tmp_path, record)
    assert [d.spans for d in damage] == [[(2000, 3000)]]
    trust.write_record(tmp_path, record)
    assert trust.read_record(tmp_path) == record


def test_checksums_are_those_of_zlib(tmp_path, monkeypatch):
    """So every record ever written stays good."""
    monkeypatch.setattr(trust, "CHUNK", 3 * trust.BLOCK + 5)
    data = np.random.default_rng(0).bytes(2 * trust.CHUNK + 7)
    (tmp_path / "x").write_bytes(data)
    summed = trust.sum_files(tmp_path, ["x"])["x"]
    cuts = range(0, len(data), trust.CHUNK)
    assert summed.bytes == len(data)
    assert summed.crc32 == [zlib.crc32(data[i : i + trust.CHUNK]) for i in cuts]
