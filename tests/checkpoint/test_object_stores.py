"""Checkpoints at s3:// and gs://, against servers on loopback that can be broken on purpose."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from megajax.checkpoint import offline, store, trust
from megajax.checkpoint import steps as steps_
from megajax.checkpoint.lease import Attempt, Lease, SupersededError
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.steps import METADATA
from megajax.checkpoint.store import ObjectPath, SaveError, StoreError
from megajax.checkpoint.trust import RECORD, CheckpointError, DamagedError, Record, read_record
from megajax.core.errors import UserError
from megajax.training.run_dir import open_run
from tests.checkpoint import object_servers
from tests.scripts.test_scripts import call
from tests.tiny import run_config

SCHEMES = ("s3", "gs")
RETRIES = {"max_retries": 4, "initial_delay": "20ms", "max_delay": "50ms"}


@pytest.fixture(scope="module")
def one_server():
    """One a process: tensorstore asks once where Google's is."""
    server = object_servers.ObjectServer()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(one_server, monkeypatch, tmp_path):
    """An empty bucket, told to the environment as to any tool."""
    for name, value in {
        "AWS_ENDPOINT_URL": one_server.url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": object_servers.KEY,
        "AWS_SECRET_ACCESS_KEY": object_servers.SECRET,
        "TENSORSTORE_GCS_HTTP_URL": one_server.url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": object_servers.TOKEN,
        "TMPDIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(store, "RETRIES", RETRIES)
    one_server.objects.clear()
    one_server.fail, one_server.silent, one_server.refuse_writes_after = 0, False, None
    one_server.loses = one_server.hidden = lambda key: False
    one_server.ghosts = set()
    one_server.conditions = "kept"
    return one_server


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def small(step=1):
    return {"x": jnp.arange(60.0) + step, "y": [jnp.int32(step)]}


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def sharded(mesh, shape, spec, dtype=jnp.float32):
    x = np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_kind_of_leaf_on_another_mesh(server, tmp_path, scheme):
    square = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    line = jax.make_mesh((4,), ("c",), devices=jax.devices()[:4])
    tree = {
        "f32": sharded(square, (64, 256), ("a", "b")),
        "bf16": sharded(square, (8, 12), ("b", None), jnp.bfloat16),
        "copies": sharded(square, (6,), ()),
        "int8": jnp.arange(-4, 4, dtype=jnp.int8),
        "fp8": jnp.asarray(np.arange(4).astype(jnp.float8_e4m3fn)),
        "bool": jnp.array([True, False]),
        "key": jax.random.key_data(jax.random.key(7)),
        "scalar": jnp.float32(1.5),
        "empty": jnp.zeros((4, 0, 2), jnp.bfloat16),
        "host": np.arange(6, dtype=np.float64).reshape(2, 3) / 7,
    }
    manager = CheckpointManager(f"{scheme}://bucket/runs/one", keep=2)
    assert manager.latest() is None and manager.steps() == []
    manager.save(7, tree, data_state={"rows": 112}, metric=0.5).result()
    assert manager.steps() == [7] and manager.latest() == 7
    assert manager.data_state(7) == {"rows": 112} and manager.verify(7).metric == 0.5
    assert all(key.startswith("runs/one/7/") for key in server.objects)
    abstract = {n: x if n == "host" else like(x) for n, x in tree.items()}
    assert_equal(tree, manager.restore(like=abstract))
    across = NamedSharding(line, PartitionSpec(None, "c"))
    abstract["f32"] = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=across)
    restored = CheckpointManager(manager.folder, keep=2).restore(7, like=abstract)
    assert_equal(tree, restored)
    assert restored["f32"].sharding.is_equivalent_to(across, 2)
    part = manager.restore(like={"f32": abstract["f32"]}, partial=True)
    assert_equal({"f32": tree["f32"]}, part)
    staged = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert staged == []  # what lay on the disk on the way is gone
    leaves = offline.StoredLeaves(manager.folder / "7", manager.verify(7))
    assert leaves["f32"].tobytes() == np.asarray(tree["f32"]).tobytes()
    assert leaves["bf16"].tobytes() == np.asarray(tree["bf16"]).tobytes()


def test_plain_orbax_reads_a_step_that_was_copied_from_a_store(server, tmp_path):
    import orbax.checkpoint.experimental.v1 as ocp

    CheckpointManager("s3://bucket/run").save(3, small()).result()
    for key, content in server.objects.items():
        (tmp_path / "copy" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / key).write_bytes(content)
    assert_equal(small(), ocp.load(tmp_path / "copy" / "run" / "3", like(small())))
    local = CheckpointManager(tmp_path / "copy" / "run")
    assert_equal(small(), local.restore(like=like(small())))


def test_retention_and_the_best(server):
    manager = CheckpointManager("s3://bucket/run", keep=1, best=1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (10, 4.0)):
        manager.save(step, small(step), metric=loss).result()
    assert manager.steps() == [2, 10]
    manager.wait()
    assert {key.split("/")[1] for key in server.objects} == {"2", "10"}  # not one object more


def put_step(steps, step):
    """Stores a step as the manager does, without arrays. Returns: whether it counts."""
    steps.begin(step)
    try:
        folder = steps.saving(step)
        folder.mkdir()
        for name in ("data", METADATA):
            (folder / name).write_text(f"{name} {step}")
        files = trust.sum_files(folder, trust.list_files(folder))
        trust.write_record(folder, Record(step, files, {}))
        steps.commit(step)
    except (OSError, StoreError):
        steps.drop_saving(step)
        return False
    finally:
        steps.unlock()
    return True


def good(server, step):
    """An oracle of its own: tells whether the bucket holds what `put_step` wrote."""
    contents = {name: f"{name} {step}".encode() for name in ("data", METADATA)}
    there = all(server.objects.get(f"c/{step}/{n}") == text for n, text in contents.items())
    return there and f"c/{step}/{RECORD}" in server.objects


def test_keys_that_are_listed_and_not_there_are_no_steps(server):
    steps = steps_.open_steps("s3://bucket/c")
    assert all(put_step(steps, step) for step in (1, 2, 3))
    server.ghosts = {f"c/{step}/{RECORD}" for step in (500, 600, 700)}
    server.ghosts |= {f"c/0900/{RECORD}", f"c/\u0669/{RECORD}"}
    assert steps.steps() == [1, 2, 3, 500, 600, 700]
    steps.retain(2, 0, (), 3)
    assert [step for step in range(1, 4) if good(server, step)] == [2, 3]
    manager = CheckpointManager("s3://bucket/c", keep=2)
    assert manager.latest() == 3


@pytest.mark.parametrize("lost", ["data", METADATA, RECORD])
def test_a_step_whose_objects_a_store_lost_was_not_saved(server, lost):
    steps = steps_.open_steps("s3://bucket/c")
    assert put_step(steps, 1)
    server.loses = lambda key: key.endswith(lost)
    assert not put_step(steps, 2)
    assert steps.steps() == [1] and good(server, 1)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_only_the_newest_attempt_saves(server, monkeypatch, scheme):
    old, new = (steps_.open_steps(f"{scheme}://bucket/c") for _ in range(2))
    old.lease, new.lease = (Lease(old.path, Attempt("r", number)) for number in (0, 1))
    assert put_step(old, 1)
    read = Lease._read

    def overtaken(self):
        """The newer attempt comes between the look and the write of the older one."""
        content = read(self)
        monkeypatch.setattr(Lease, "_read", read)
        new.lease.take()
        return content

    monkeypatch.setattr(Lease, "_read", overtaken)
    with pytest.raises(SupersededError, match="a newer attempt has taken over"):
        old.lease.take()
    with pytest.raises(SupersededError, match="a newer attempt has taken over"):
        put_step(old, 2)
    assert put_step(new, 3) and new.steps() == [1, 3]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_of_two_writers_of_one_version_one_wins(server, scheme):
    """An oracle of its own: swaps of one object by hand."""
    path = store.ObjectPath(f"{scheme}://bucket/c/attempt.json")
    none, fresh = path.read_version()
    assert none == b"" and path.swap(b"a", fresh) and not path.swap(b"b", fresh)
    text, version = path.read_version()
    assert text == b"a" and path.swap(b"c", version) and not path.swap(b"d", version)
    assert server.objects["c/attempt.json"] == b"c"


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_store_without_conditional_writes(server, monkeypatch, scheme):
    """One that ignores conditions: an older attempt is refused at its next look. One that refuses
    them: the save is refused, and the message says why."""
    server.conditions = "ignored"
    old, new = (steps_.open_steps(f"{scheme}://bucket/c") for _ in range(2))
    old.lease, new.lease = (Lease(old.path, Attempt("r", number)) for number in (0, 1))
    old.lease.take()
    new.lease.take()
    with pytest.raises(SupersededError):
        put_step(old, 1)
    assert put_step(new, 1)
    server.conditions = "refused"
    with pytest.raises(StoreError, match="attempt.json.*takes no conditional writes"):
        new.lease.take()


def test_an_older_attempt_that_wakes_up_while_it_sends_stops(server, monkeypatch):
    """It had sent one of its files; the newer one then sent the same step, which stays whole."""
    old = steps_.open_steps("s3://bucket/c")
    old.lease = Lease(old.path, Attempt("r", 0))
    write, newer = store.ObjectPath.write, {}

    def frozen(self, content):
        write(self, content)
        if not newer and self.name == METADATA:
            Lease(old.path, Attempt("r", 1)).take()
            newer.update({f"c/1/{name}": b"newer" for name in ("data", RECORD)})
            server.objects.update(newer)

    monkeypatch.setattr(steps_, "WORKERS", 1)
    monkeypatch.setattr(store.ObjectPath, "write", frozen)
    with pytest.raises(SupersededError):
        put_step(old, 1)
    old.drop_saving(1)
    assert newer and {k: server.objects.get(k) for k in newer} == newer


def test_a_step_does_not_clear_a_run_whose_prefix_lies_in_its_own(server):
    assert put_step(steps_.open_steps("s3://bucket/c/5"), 1)
    held = dict(server.objects)
    steps = steps_.open_steps("s3://bucket/c")
    with pytest.raises(CheckpointError, match="5 holds 1/, a step of another run"):
        put_step(steps, 5)
    server.objects["c/5/unfinished"] = b""
    steps.empty()
    assert server.objects == held


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 60))]
)
def test_no_good_step_is_lost_in_a_store_that_lies(server, seed):
    """Objects that were accepted and are lost, and listings with too much and with too little."""
    random = np.random.default_rng(seed)
    keep, loss = int(random.integers(1, 4)), float(random.choice([0, 0.1, 0.3]))
    steps = steps_.open_steps("s3://bucket/c")
    for step in random.permutation(20)[:10].tolist():
        before = {s for s in range(20) if good(server, s)}
        guessed = [f"c/{s}/{n}" for s in range(25) for n in (RECORD, "data")]
        server.ghosts = set(random.choice(guessed, 6).tolist())
        hidden = set(random.choice(guessed, 6).tolist())
        server.hidden = lambda key, hidden=hidden: key in hidden
        server.loses = lambda key: random.random() < loss
        if put_step(steps, step):
            before.add(step)
            steps.retain(keep, 0, (), step)
        steps.empty()
        now = {s for s in range(20) if good(server, s)}
        assert before >= now
        for gone in before - now:
            assert sum(s > gone for s in now) >= keep, (seed, gone, before, now)


def test_a_step_can_be_saved_again(server):
    manager = CheckpointManager("s3://bucket/run")
    manager.save(1, small(1))
    manager.close()
    before = set(server.objects)
    manager.save(1, small(5), data_state={"rows": 3})
    assert_equal(small(5), manager.restore(like=like(small())))
    assert len(server.objects) == len(before) and manager.data_state(1) == {"rows": 3}
    assert_equal(
        small(5), CheckpointManager(manager.folder, verify=None).restore(1, like=like(small()))
    )


class Killed(BaseException):
    """No handler of the program sees it, as none sees kill -9."""


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_while_a_step_is_saved_again_loses_no_copy(server, monkeypatch, stride):
    """After each write and delete of the store, one by one."""
    manager = CheckpointManager("s3://bucket/run")
    manager.save(1, small(1))
    manager.close()
    write, delete, restored, previous = ObjectPath.write, ObjectPath.delete, [], 1
    for kill_at in range(0, 200, stride):
        left = [kill_at]

        def count(call, left=left):
            def counted(*args):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return call(*args)

            return counted

        steps = steps_.open_steps("s3://bucket/run")
        value = 2 + kill_at
        with monkeypatch.context() as patch:
            patch.setattr(ObjectPath, "write", count(write))
            patch.setattr(ObjectPath, "delete", count(delete))
            try:
                stage_again(steps, value)
            except Killed:
                pass
            steps.unlock()
        again = CheckpointManager("s3://bucket/run", verify_saves=False)
        now = int(again.restore(1, like=like(small()))["y"][0])
        restored.append(now == value)
        assert again.steps() == [1] and now in (value, previous)
        previous = now
        if left[0] > 0:
            break
    assert restored[0] is False and restored[-1] is True and restored == sorted(restored)
    homes = {key.split("/")[2] for key in server.objects if key.startswith("run/1/copy-")}
    assert len(homes) == 1 and not any(key.startswith("run/1/state") for key in server.objects)


def stage_again(steps, value):
    """Saves step 1 as the manager does: Orbax's files are those of a local step."""
    local = CheckpointManager(steps._stage.path / "other", verify_saves=False)
    local.save(1, small(value))
    local.close()
    steps.begin(1)
    (local.folder / "1").rename(steps.saving(1))
    steps.commit(1)


def test_no_damage_is_loaded(server):
    """A flipped byte, a shorter, a longer and a missing object: an error, or the right bytes."""
    manager = CheckpointManager("s3://bucket/run")
    tree = {"x": jnp.arange(4096.0), "y": jnp.arange(40, dtype=jnp.int8)}
    manager.save(1, tree)
    manager.save(2, tree)
    manager.close()
    good = {k: x for k, x in server.objects.items() if not k.endswith(trust.MARK)}
    named = 0
    for key in sorted(k for k in good if k.startswith("run/2/")):
        content = good[key]
        spoilt = {
            "flip": bytes([*content[:-1], content[-1] ^ 4]) if content else None,
            "middle": content[: len(content) // 2] + b"\xff" + content[len(content) // 2 + 1 :],
            "shorter": content[:-1],
            "longer": content + b"junk",
            "gone": None,
        }
        for kind, other in spoilt.items():
            if other == content:
                continue
            server.objects.update({key: other} if other is not None else {})
            if other is None:
                del server.objects[key]
            fresh = CheckpointManager("s3://bucket/run")
            try:
                assert_equal(tree, fresh.restore(2, like=like(tree)))
            except CheckpointError as error:
                assert "step 2" in str(error)
                named += key.removeprefix("run/2/") in str(error)
            if kind in ("flip", "longer"):
                with pytest.raises(DamagedError, match="step 2"):
                    fresh.verify(2)
            if kind == "flip":
                assert_equal(tree, fresh.restore(like=like(tree)))
            server.objects[key] = content
    assert named > len(good)
    assert_equal(tree, CheckpointManager("s3://bucket/run").restore(2, like=like(tree)))


def test_what_a_killed_save_left_is_ignored_and_goes(server):
    manager = CheckpointManager("s3://bucket/run", keep=0)
    manager.save(1, small(1)).result()
    manager.save(2, small(2)).result()
    objects = dict(server.objects)
    del server.objects[f"run/2/{RECORD}"]  # killed before the record: marked, some objects sent
    server.objects[f"run/2/{steps_.UNFINISHED_MARK}"] = b""
    server.objects[f"run/1/{steps_.UNFINISHED_MARK}"] = b""  # killed after it
    server.objects["run/notes/mine.txt"] = b"none of ours"
    again = CheckpointManager("s3://bucket/run", keep=0)
    assert again.steps() == [1] and again.latest() == 1
    assert_equal(small(1), again.restore(like=like(small())))
    again.save(3, small(3)).result()
    assert again.steps() == [1, 3]
    steps = {key.split("/")[1] for key in server.objects}
    assert steps == {"1", "3", "notes"} and not any("unfinished" in key for key in server.objects)
    assert all(server.objects[k] == v for k, v in objects.items() if k.startswith("run/1/"))


@pytest.mark.parametrize("sent", (0, 1, 4, 9))
def test_a_save_that_is_refused_midway_leaves_the_one_before(server, tmp_path, sent):
    manager = CheckpointManager("s3://bucket/run")
    manager.save(1, small(1))
    manager.close()
    before = dict(server.objects)
    server.refuse_writes_after = sent
    with pytest.raises(SaveError, match=r"step 2 .*access denied.*AWS_ACCESS_KEY_ID"):
        manager.save(2, small(2)).result()
    assert server.objects == before and manager.latest() == 1
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    server.refuse_writes_after = None
    manager.save(2, small(2)).result()
    assert_equal(small(2), manager.restore(like=like(small())))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_that_answers_503_now_and_then_is_asked_again(server, scheme):
    server.fail = 3
    manager = CheckpointManager(f"{scheme}://bucket/run", keep=1)
    for step in (1, 2):
        manager.save(step, small(step)).result()
    assert_equal(small(2), manager.restore(like=like(small())))
    assert manager.steps() == [2]
    manager.verify(2)


def test_a_server_that_is_away_is_an_error_in_time(server, monkeypatch):
    manager = CheckpointManager("s3://bucket/run")
    manager.save(1, small()).result()
    began = time.monotonic()
    server.fail = 1
    with pytest.raises(StoreError, match="no answer.*SlowDown.*AWS_ENDPOINT_URL"):
        manager.restore(like=like(small()))
    with pytest.raises(StoreError, match="no answer"):
        read_record(manager.folder / "1")  # which would be damage if it were lost
    with pytest.raises(SaveError, match="step 2 .*no answer"):
        manager.save(2, small()).result()
    server.fail = 0
    monkeypatch.setattr(store, "PATIENCE_S", 0.5)
    server.silent = True
    with pytest.raises(StoreError, match="no answer within 0.5 s"):
        manager.latest()
    assert time.monotonic() - began < 10
    server.silent = False
    monkeypatch.setattr(store, "PATIENCE_S", 60)
    assert manager.latest() == 1  # nothing was held against the step
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="no answer.*connect"):
        manager.latest()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_bucket(server, scheme):
    manager = CheckpointManager(f"{scheme}://other/run")
    with pytest.raises(SaveError, match="there is no bucket other"):
        manager.save(1, small()).result()
    with pytest.raises(CheckpointError, match="bucket"):
        CheckpointManager(f"{scheme}://")


def test_wrong_credentials(server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped")
    store._open.cache_clear()
    with pytest.raises(StoreError, match="access denied.*SignatureDoesNotMatch.*AWS_PROFILE"):
        CheckpointManager("s3://bucket/run").steps()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # else it asks the machine's own role
    with pytest.raises(StoreError, match="access denied.*set AWS_ACCESS_KEY_ID"):
        CheckpointManager("s3://bucket/run").steps()
    store._open.cache_clear()


@pytest.mark.process
def test_the_tool(server):
    manager = CheckpointManager("s3://bucket/run")
    for step in (1, 2):
        manager.save(step, small(step), data_state={"rows": 16 * step}).result()
    done = call("checkpoint.py", "inspect", "s3://bucket/run", "--step=1")
    assert done.returncode == 0, done.stderr
    assert '{"rows": 16}' in done.stdout and "x: float32(60,)" in done.stdout
    done = call("checkpoint.py", "diff", "s3://bucket/run/1", "s3://bucket/run/2")
    assert done.returncode == 1 and "x: other values" in done.stdout
    done = call("checkpoint.py", "reshard", "s3://bucket/run/1", "gs://bucket/new")
    assert done.returncode == 0, done.stderr
    assert_equal(small(1), CheckpointManager("gs://bucket/new").restore(like=like(small())))
    assert not Path("gs:").exists()  # what is on its way is not spooled beside the caller
    key = next(k for k in server.objects if k.startswith("run/2/state/d/"))
    server.objects[key] = server.objects[key][:-1]
    done = call("checkpoint.py", "verify", "s3://bucket/run/")
    assert done.returncode == 1 and "step 1: " in done.stdout and f": {key[6:]}: " in done.stdout
    with pytest.raises(UserError, match="s3://bucket/none has no checkpoint"):
        offline.open_folder("s3://bucket/none")


def test_where_a_run_saves(server, tmp_path):
    cfg = run_config(run_dir=str(tmp_path / "run"), checkpoint__dir="s3://bucket/run")
    run_dir = open_run(cfg, "pretrain", "nano")
    assert run_dir.checkpoints == "s3://bucket/run" and run_dir.profile == tmp_path / "run/profile"
    (tmp_path / "run" / "checkpoints" / "0").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"imported weights.*--checkpoint.dir"):
        open_run(cfg, "pretrain", "nano")
    with pytest.raises(CheckpointError, match="http://bucket/run is no place: s3://BUCKET"):
        CheckpointManager("http://bucket/run")


def test_an_address_is_no_local_path(server):
    path = ObjectPath("s3://bucket/run")
    assert str(path / "7" / "x") == "s3://bucket/run/7/x" and path.parent.name == "bucket"
    for attempt in (path.mkdir, path.unlink, lambda: open(path, "w"), lambda: path.write_text("")):
        with pytest.raises(TypeError, match="not a path of this machine"):
            attempt()
