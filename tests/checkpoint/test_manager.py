import os
import shutil
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.checkpoint.steps import FORMER, MARK, StepFolder
from megajax.checkpoint.store import SaveError
from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.training.step import make_train_step
from megajax.training.task import TrainState
from tests.tiny import run_config


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.sharding.is_equivalent_to(y.sharding, x.ndim)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def train_step():
    cfg = run_config(mesh__tensor=2, model__kv_heads=1)  # both ranks share the head
    return make_train_step(cfg, cfg.mesh.build())


@pytest.fixture(scope="module")
def state(train_step):
    return train_step.init(0)


def test_a_state_comes_back_bit_for_bit(tmp_path, train_step, state):
    manager = CheckpointManager(tmp_path)
    assert manager.latest() is None and manager.steps() == []
    manager.save(7, vars(state), data_state={"rows": 112, "seed": 0}).result()
    assert manager.steps() == [7] and manager.latest() == 7
    restored = manager.restore(like=vars(train_step.abstract_state))
    data = manager.data_state(7)
    assert data == {"rows": 112, "seed": 0}
    assert_equal(vars(state), restored)
    assert_equal(TrainState(**restored), state)


@pytest.mark.parametrize(
    "changes", [{"mesh__tensor": 4}, {"mesh__data": 1}, {"mesh__node": 2, "shard__zero": "hybrid"}]
)
def test_a_state_comes_back_on_another_mesh(tmp_path, state, changes):
    manager = CheckpointManager(tmp_path)
    manager.save(1, vars(state), data_state={}).result()
    cfg = run_config(**changes, model__kv_heads=1)
    other = make_train_step(cfg, cfg.mesh.build())
    restored = manager.restore(like=vars(other.abstract_state))
    for a, b in zip(jax.tree.leaves(vars(state)), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    abstract = vars(other.abstract_state)
    for x, y in zip(jax.tree.leaves(abstract), jax.tree.leaves(restored), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, y.ndim)


def test_leaves_without_elements_come_back_from_storage_and_from_memory(tmp_path):
    """On all devices, cut or not, and on another mesh."""
    mesh, other = jax.make_mesh((4, 2), ("a", "b")), jax.make_mesh((2,), ("a",))
    specs = {"none": P(), "cut": P("a"), "inner": P(None, "b"), "x": P("a", "b")}
    shapes = {"none": (0, 4), "cut": (4, 0), "inner": (3, 2, 0), "x": (8, 6)}
    state = {
        n: jax.device_put(
            np.arange(np.prod(s), dtype=np.float32).reshape(s), NamedSharding(mesh, specs[n])
        )
        for n, s in shapes.items()
    }
    elsewhere = {
        n: jax.ShapeDtypeStruct(s, np.float32, sharding=NamedSharding(other, P()))
        for n, s in shapes.items()
    }
    manager = CheckpointManager(tmp_path / "steps")
    manager.save(3, state, data_state={"rows": 6}).result()
    assert manager.verify(3).leaves["none"].fingerprint == [0, 0]
    assert_equal(state, manager.restore(like=like(state)))
    tier = MemoryTier(tmp_path / "tier", 0)
    tier.put(3, state, {"rows": 6})
    tier.wait()
    for target in (like(state), elsewhere):
        from_memory = MemoryTier(tmp_path / "tier", 1).take(target, 3)[1]
        assert_equal(manager.restore(like=target), from_memory)
    nothing = {"none": state["none"]}
    manager.save(4, nothing, data_state={}).result()
    assert_equal(nothing, manager.restore(4, like=like(nothing)))


def test_donating_while_storage_goes_on_does_not_change_what_is_stored(tmp_path):
    step = jax.jit(lambda t: jax.tree.map(lambda x: -x, t), donate_argnums=0)
    tree = {f"x{i}": jnp.full((512, 512), float(i)) for i in range(16)}
    shapes = like(tree)
    manager = CheckpointManager(tmp_path)
    handle = manager.save(1, tree, data_state={})
    for _ in range(3):
        tree = step(tree)
    handle.result()
    restored = manager.restore(like=shapes)
    assert all((np.asarray(restored[f"x{i}"]) == i).all() for i in range(16))


def test_a_part_can_be_restored(tmp_path, train_step, state):
    manager = CheckpointManager(tmp_path)
    manager.save(1, vars(state), data_state={}).result()
    abstract = {"params": train_step.abstract_state.params}
    restored = manager.restore(like=abstract, partial=True)
    assert_equal(restored["params"], state.params)


def test_only_the_newest_are_kept(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    for step, there in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (10, [3, 10])):
        manager.save(step, {"x": jnp.ones(3)}, data_state={})
        manager.close()
        assert manager.steps() == there
    everything = CheckpointManager(tmp_path / "all", keep=0)
    for step in (1, 2, 3):
        everything.save(step, {"x": jnp.ones(3)}, data_state={})
    everything.close()
    assert everything.steps() == [1, 2, 3]


def test_a_step_counts_before_old_bytes_are_gone(tmp_path, monkeypatch, caplog):
    slow, allowed = StepFolder.empty, threading.Event()
    monkeypatch.setattr(StepFolder, "empty", lambda self: allowed.wait(20) and slow(self))
    manager = CheckpointManager(tmp_path, keep=1)
    allowed.set()
    manager.save(1, {"x": np.ones(3)})
    manager.wait()
    allowed.clear()
    manager.save(3, {"x": np.ones(3)}).result()
    assert manager.steps() == [3] and manager.latest() == 3
    assert any(p.name.startswith("1") for p in tmp_path.iterdir())
    allowed.set()
    manager.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["3"]

    def refuse(self):
        raise OSError("disk is asleep")

    monkeypatch.setattr(StepFolder, "empty", refuse)
    manager.save(4, {"x": np.ones(3)}).result()
    manager.close()  # a step that counts is saved, whatever stays behind
    assert "disk is asleep" in caplog.text


def test_the_best_are_kept_beside_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, best=2)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 2.5)):
        manager.save(step, {"x": jnp.ones(3)}, metric=loss).result()
    assert manager.steps() == [2, 4, 5]
    assert [manager.verify(s).metric for s in manager.steps()] == [1.0, 2.0, 2.5]


def test_every_kind_of_leaf(tmp_path):
    manager = CheckpointManager(tmp_path)
    tree = {
        "bf16": jnp.ones((3, 5), jnp.bfloat16) / 3,
        "int8": jnp.arange(-4, 4, dtype=jnp.int8),
        "bool": jnp.array([True, False]),
        "key": jax.random.key_data(jax.random.key(7)),
        "fp8": jnp.asarray(np.arange(4).astype(jnp.float8_e4m3fn)),
        "scalars": (jnp.float32(1.5), jnp.int32(3)),
        "empty": [jnp.zeros((0,)), jnp.zeros((4, 0, 2), jnp.bfloat16)],
        "host": np.arange(6, dtype=np.float64).reshape(2, 3) / 7,
    }
    abstract = {n: x if n == "host" else like(x) for n, x in tree.items()}
    handle = manager.save(1, tree)
    handle.result()
    assert handle.blocking_s > 0
    restored = manager.restore(like=abstract)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(restored), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    leaves = manager.verify(1).leaves
    assert leaves["empty.1"].shape == [4, 0, 2] and leaves["host"].dtype == "float64"


def test_bytes_are_compressed_and_floats_are_not(tmp_path):
    sizes = {}
    for name, dtype in (("codes", jnp.int8), ("weights", jnp.float32)):
        manager = CheckpointManager(tmp_path / name)
        manager.save(1, {"x": jnp.zeros(1 << 16, dtype)}).result()
        sizes[name] = sum(f.bytes for f in manager.verify(1).files.values())
    assert sizes["codes"] < 1 << 14 < 1 << 18 < sizes["weights"]


def test_another_manager_leaves_a_save_under_way_alone(tmp_path):
    """Sampling from a run's folder, say, while the run saves."""
    manager = CheckpointManager(tmp_path)
    tree = {"x": jnp.ones((1024, 1024))}
    for step in range(1, 4):
        handle = manager.save(step, tree)
        for _ in range(5):
            CheckpointManager(tmp_path, keep=0)
        handle.result()
    assert manager.steps() == [1, 2, 3]


def test_a_kill_between_two_renames_loses_nothing(tmp_path):
    CheckpointManager(tmp_path).save(1, {"x": jnp.ones(3)}).finish()  # a kill reads nothing back
    for name in ("1.saving", "2.saving", "0.trash"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARK).touch()
    (tmp_path / "1").rename(tmp_path / "1.saving" / FORMER)
    (tmp_path / "3.saving").mkdir()  # killed before the mark
    manager = CheckpointManager(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert manager.restore(like=like({"x": jnp.ones(3)}))["x"].tolist() == [1.0] * 3


def test_the_same_step_may_be_saved_again(tmp_path):
    manager = CheckpointManager(tmp_path)
    for value in (1.0, 2.0):
        manager.save(5, {"x": jnp.full(3, value)}, data_state={}).result()
    restored = manager.restore(like=like({"x": jnp.ones(3)}))
    assert restored["x"].tolist() == [2.0] * 3


def test_leavings_of_a_killed_save_are_removed_and_ignored(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": jnp.ones(3)}, data_state={}).result()
    manager.close()
    (tmp_path / "2.saving").mkdir()
    (tmp_path / "2.saving" / MARK).touch()
    shutil.copytree(tmp_path / "1", tmp_path / "2.saving" / "new.orbax-checkpoint-tmp")
    (tmp_path / "9").mkdir()  # no checkpoint in it
    again = CheckpointManager(tmp_path)
    assert again.steps() == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "9"]


@pytest.mark.parametrize(
    ("abstract", "words"),
    [
        (
            {"x": jnp.ones(4)},
            r"cannot restore step 1 .* leaf x is float32\(3,\) there and .*\(4,\)",
        ),
        ({"x": jnp.ones(3, jnp.bfloat16)}, "leaf x is float32.* and bfloat16"),
        ({"x": jnp.ones(3), "y": jnp.ones(3)}, "leaf y is not there"),
        ({"xs": jnp.ones(3)}, "leaf xs is not there. Did you mean x.*; leaf x is there and not in"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(tmp_path, abstract, words):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": jnp.ones(3)}, data_state={}).result()
    with pytest.raises(UserError, match=words):
        manager.restore(like=like(abstract))


def test_a_missing_step_is_named(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UserError, match=r"has no checkpoint \(--run_dir\)"):
        manager.restore(like={})
    manager.save(1, {"x": jnp.ones(3)}, data_state={}).result()
    with pytest.raises(UserError, match=r"has no step 4; it has \[1\] \(--step\)"):
        manager.restore(4, like={})


def test_plain_orbax_reads_our_steps(tmp_path, state):
    import orbax.checkpoint.experimental.v1 as ocp

    CheckpointManager(tmp_path).save(3, vars(state), data_state={}).result()
    loaded = ocp.load(str(tmp_path / "3"), like(vars(state)))
    assert_equal(vars(state), loaded)


def test_a_save_that_cannot_begin_fails_in_the_handle(tmp_path):
    (tmp_path / "file").write_text("in the way")
    manager = CheckpointManager(tmp_path / "file" / "checkpoints")
    handle = manager.save(1, {"x": jnp.ones(3)}, data_state={})
    with pytest.raises(SaveError, match="step 1 was not saved"):
        handle.result()


def test_a_save_that_failed_may_be_tried_again(monkeypatch, capsys):
    """Exit code 75: launchers take 2 for a command that can never work."""
    monkeypatch.setattr(config.script, "start", lambda guarded: guarded(["script"]))
    for error, code in ((SaveError("no space left"), 75), (UserError("no such flag"), 2)):

        def main(error=error):
            raise error

        with pytest.raises(SystemExit) as ended:
            config.run(main)
        assert ended.value.code == code and str(error) in capsys.readouterr().err


def fill(folder, size):
    (folder / "ballast").write_bytes(b"x" * size)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_harms_nothing_and_the_same_manager_recovers(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk])
    if mounted.returncode:
        pytest.skip("this machine does not let root mount")
    try:
        manager = CheckpointManager(disk / "checkpoints")
        tree = {"x": jnp.arange(1 << 20, dtype=jnp.float32)}  # 4 MiB
        manager.save(1, tree, data_state={"rows": 1}).result()
        fill(disk, 10 << 20)
        handle = manager.save(2, tree, data_state={"rows": 2})
        with pytest.raises(SaveError) as error:
            handle.result()
        assert "step 2 was not saved" in str(error.value) and "full" in str(error.value) + (
            "full" if "no space left" in str(error.value) else ""
        )
        assert manager.steps() == [1]
        assert [p.name for p in (disk / "checkpoints").iterdir()] == ["1"]  # no leavings
        restored = manager.restore(like=like(tree))
        assert manager.data_state(1) == {"rows": 1}
        np.testing.assert_array_equal(np.asarray(restored["x"]), np.asarray(tree["x"]))
        (disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(SaveError, match="step 2 was not saved.*read-only"):
            manager.save(2, tree).result()
        assert CheckpointManager(disk / "checkpoints").restore(like=like(tree)).keys() == {"x"}
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        manager.save(3, tree, data_state={"rows": 3}).result()
        assert manager.steps() == [1, 3]
        manager.close()  # it may still be removing what old saves left, and the disk be busy
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # a reader may be late


LIMITED = """
    import resource, sys
    import jax, jax.numpy as jnp
    jax.config.update("jax_platforms", "cpu")
    from megajax.checkpoint.manager import CheckpointManager, SaveError
    manager = CheckpointManager(sys.argv[1])
    tree = {"x": jnp.arange(1 << 20, dtype=jnp.float32)}
    manager.save(1, tree, data_state={}).result()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        manager.save(2, tree, data_state={}).result()
    except SaveError as error:
        print("refused:", error)
    print(manager.steps())
"""


@pytest.mark.process
def test_a_file_size_limit_is_like_a_full_disk(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), tmp_path], capture_output=True, text=True
    )
    assert "refused: step 2 was not saved" in done.stdout, done.stdout + done.stderr
    assert done.stdout.strip().endswith("[1]")


def test_a_mesh_in_scope_does_not_matter(tmp_path, state, train_step):
    manager = CheckpointManager(tmp_path)
    with jax.set_mesh(MeshSpec(tensor=2).build()):
        manager.save(1, vars(state), data_state={}).result()
        restored = manager.restore(like=vars(train_step.abstract_state))
    assert_equal(vars(state), restored)
