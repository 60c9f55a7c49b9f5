"""What a save accepts comes back bit for bit; the rest is refused before anything is written."""

import shutil
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import orbax_io, run_folder
from megajax.checkpoint.manager import CheckpointManager, is_key
from megajax.checkpoint.sealing import Sealer
from megajax.checkpoint.trust import damaged, find_damage, read_record
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel import sharding

X = {"x": jnp.arange(3.0)}


def data(tree):
    """Random keys as their words, everything in NumPy."""
    words = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    return [np.asarray(x) for x in jax.tree.leaves(words)]


def abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(data(a), data(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def test_random_keys_come_back_as_keys(tmp_path):
    manager = CheckpointManager(tmp_path)
    cut = NamedSharding(jax.make_mesh((8,), ("d",)), P("d"))
    state = {
        "one": jax.random.key(3),
        "rbg": jax.random.key(3, impl="rbg"),
        "cut": jax.device_put(jax.random.split(jax.random.key(4), 8), cut),
        "dropout": nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(1))),
    }
    manager.save(1, state).result()
    like = jax.tree.map(abstract, state)
    for target in (state, like):
        restored = manager.restore(1, like=target)
        assert_same(restored, state)
        assert restored["cut"].sharding.is_equivalent_to(cut, 1)
        assert restored["rbg"].dtype == state["rbg"].dtype
    draws = [jax.random.bits(s["one"]).item() for s in (state, restored)]
    assert draws[0] == draws[1]


def test_arrays_of_the_host_may_change_when_save_returns(tmp_path):
    manager = CheckpointManager(tmp_path)
    x = np.arange(2**16, dtype=np.float32)
    was = {"x": x.copy()}
    handle = manager.save(1, {"x": x})
    x[:] = -1
    handle.result()
    assert_same(manager.restore(1, like=was), was)


def test_the_order_of_bytes_is_not_part_of_the_type(tmp_path):
    manager = CheckpointManager(tmp_path)
    foreign = {"x": np.arange(6, dtype=">f4"), "n": np.arange(6, dtype=">i8")}
    native = {"x": np.arange(6, dtype=np.float32), "n": np.arange(6)}
    manager.save(1, foreign).result()
    for like in (native, foreign):
        assert_same(manager.restore(1, like=like), native)


def test_four_bit_floats_and_other_memory(tmp_path):
    manager = CheckpointManager(tmp_path)
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).reshape(2, 8)
    try:
        jax.jit(lambda x: x.astype(jnp.float32))(jnp.asarray(codes))
    except jax.errors.JaxRuntimeError:  # by way of float16, which SSE4.2 alone has not
        pytest.skip("XLA cannot widen 4-bit floats for a CPU without F16C")
    host = NamedSharding(jax.make_mesh((2,), ("d",)), P("d"), memory_kind="unpinned_host")
    state = {
        "fp4": jnp.asarray(codes),
        "numpy": codes,
        "host": jax.device_put(np.arange(8.0, dtype=np.float32), host),
    }
    manager.save(1, state).result()
    restored = manager.restore(1, like=state)
    assert_same(restored, state)
    assert restored["host"].sharding.memory_kind == "unpinned_host"
    prints = manager.verify(1).leaves
    assert prints["fp4"].fingerprint == prints["numpy"].fingerprint


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a.b": 1.0, "a": {"b": 2.0}}, "two leaves are named a.b"),
        ({"a": {"": 1.0}, "a.": 2.0}, "two leaves are named a[.]"),
        ({"a/": 1.0}, "leaf a/: a name must not end in a slash"),
        ({"\ud800": 1.0}, "cannot be written as UTF-8"),
        ({}, "holds no array"),
        ({"a": None}, "holds no array"),
        ({"w": jnp.zeros(2, jnp.uint4)}, "leaf w is uint4, which storage has no type for"),
        ({"w": np.array(["text"])}, "leaf w is str128"),
        ({"w": np.array([{}])}, "leaf w is object"),
    ],
)
def test_what_could_not_be_restored_is_refused(tmp_path, state, words):
    manager = CheckpointManager(tmp_path / "new")
    with pytest.raises(UserError, match=words):
        manager.save(1, state)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [-1, True, 2.0, "3", None])
def test_a_step_is_a_whole_number(tmp_path, step):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UserError, match=r"step .* must be a whole number from 0 on"):
        manager.save(step, X)
    if step is not None:
        with pytest.raises(UserError, match=r"step .* must be a whole number from 0 on"):
            manager.restore(step, like=X)


def test_numbers_of_arrays_are_numbers(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, best=1)
    nan = np.float32("nan")
    for step, metric in ((np.int64(1), nan), (jnp.int32(2), jnp.float32(1)), (3, np.float32(2))):
        manager.save(step, X, metric=metric).result()
    manager.save(4, X).result()
    assert manager.steps() == [2, 4]  # NaN is not the best
    with pytest.raises(UserError, match="metric 'low' must be a number"):
        manager.save(5, X, metric="low")


@pytest.mark.parametrize(
    ("data_state", "words"),
    [
        ({"rows": np.int64(3)}, r"data_state\['rows'\] is np.int64\(3\) of type int64"),
        ({"a": [{1: 2}]}, r"data_state\['a'\]\[0\] has the key 1"),
        ({"megajax.integrity": 2}, "without the key megajax.integrity"),
        ([1], "must be a dict"),
    ],
)
def test_a_data_state_that_json_would_change_is_refused(tmp_path, data_state, words):
    with pytest.raises(UserError, match=words):
        CheckpointManager(tmp_path).save(1, X, data_state=data_state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": -1}, "keep=-1 must be .*--checkpoint.keep"),
        ({"keep": 2.5}, "keep=2.5 must be"),
        ({"best": -1}, "best=-1 must be"),
        ({"verify": "none"}, "verify='none' must be one of None, fast, full"),
        ({"compression": "gzip"}, "compression='gzip' must be one of auto, none, zstd"),
    ],
)
def test_settings_are_checked(tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        CheckpointManager(tmp_path, **settings)


HOST = {
    "int32": np.int32(3),
    "int": 7,
    "float": 7.5,
    "bool": True,
    "complex": 2 - 1j,
    "bfloat16": ml_dtypes.bfloat16(1.5),
    "row": np.array(4, np.float16),
    "float64": np.arange(5) / 7,
    "int64": np.arange(5) + 2**40,
    "uint64": np.arange(5, dtype=np.uint64) + 2**63,
    "scalar64": np.float64(1 / 3),
}


@pytest.fixture(scope="module")
def host_steps(tmp_path_factory):
    manager = CheckpointManager(tmp_path_factory.mktemp("host"))
    manager.save(1, HOST).result()
    return manager


def test_numbers_of_the_host_come_back(host_steps):
    """As `like` has them: numbers, arrays or descriptions without a sharding."""
    again = host_steps.restore(1, like=HOST)
    assert {n: type(x) for n, x in again.items()} == {n: type(x) for n, x in HOST.items()}
    assert_same(again, HOST)
    abstract = {n: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) for n, x in HOST.items()}
    arrays = {n: np.zeros_like(x) for n, x in HOST.items()}
    for target in (abstract, arrays):
        assert_same(host_steps.restore(1, like=target), HOST)


def test_a_type_that_devices_lack_is_refused_with_a_sharding_and_not_called_damaged(host_steps):
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"int64": jax.ShapeDtypeStruct((5,), np.int64, sharding=where)}
    with pytest.raises(UserError, match="leaf int64 of `like` is int64 with a sharding.*x64"):
        host_steps.restore(1, like=target, partial=True)
    assert host_steps.latest() == 1


def test_a_wanted_leaf_that_is_no_array_is_named(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, X).result()
    with pytest.raises(UserError, match="leaf x of `like` is 'text'"):
        manager.restore(1, like={"x": "text"})


@pytest.mark.parametrize("name", ["a%20b", "a%b", "a#b", "a b%2Fc", "größe & more", "a/../c"])
def test_a_folder_may_have_any_name_that_can_be_read_again(tmp_path, name):
    (tmp_path / "a b").mkdir()
    CheckpointManager(tmp_path / "a b").save(1, {"x": jnp.zeros(3)}).result()
    manager = CheckpointManager(tmp_path / name)
    manager.save(1, X).result()
    assert_same(manager.restore(1, like=X), X)


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?b", "a\\b"])
def test_a_folder_that_could_not_be_read_again_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="must not hold .*; nearest: .*/a_"):
        CheckpointManager(tmp_path / name)


def test_an_address_has_no_way_up():
    with pytest.raises(UserError, match="must not hold [.][.]; write the prefix out"):
        CheckpointManager("s3://bucket/a/../b")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match="is a file; name a folder"):
        CheckpointManager(tmp_path / "file")


def test_managers_of_one_folder_do_not_remove_each_others_steps(tmp_path):
    one, two = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    big = {f"x{i}": jnp.full((256, 1024), float(i)) for i in range(8)}
    first, second = one.save(1, X), two.save(2, big)
    first.result()
    CheckpointManager(tmp_path)  # removes what killed saves left
    second.result()
    assert one.steps() == [1, 2]
    assert_same(two.restore(2, like=big), big)


def test_two_managers_do_not_write_one_step_at_a_time(tmp_path, monkeypatch):
    one, two = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    go_on, store = threading.Event(), Sealer.store
    held = lambda *args: (go_on.wait(), store(*args))[1]  # noqa: E731
    monkeypatch.setattr(Sealer, "store", held)
    first, second = one.save(1, X), two.save(1, {"x": -X["x"]})
    go_on.set()
    with pytest.raises(UserError, match="another manager of this process is saving step 1"):
        second.result()
    first.result()
    assert_same(one.restore(1, like=X), X)
    two.save(1, {"x": -X["x"]}).result()
    assert_same(one.restore(1, like=X), {"x": -X["x"]})


def test_threads_may_save_at_once(tmp_path):
    manager = CheckpointManager(tmp_path / "shared", keep=0)
    failed = []

    def save(step):
        other = CheckpointManager(tmp_path / str(step))
        for place in (manager, other):
            try:
                place.save(step, {"x": jnp.full(3, float(step))}).result()
            except UserError as error:
                failed.append(error)

    threads = [threading.Thread(target=save, args=(step,)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and manager.steps() == list(range(6))
    for step in manager.steps():
        assert manager.restore(step, like=X)["x"].tolist() == [float(step)] * 3


def test_a_data_state_is_there_when_it_was_saved(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, X, data_state={"rows": 3})
    assert manager.data_state(1) == {"rows": 3}
    with pytest.raises(UserError, match="has no step 2; it has .1."):
        manager.data_state(2)


def test_a_step_that_was_moved_and_linked_is_replaced(tmp_path):
    manager = CheckpointManager(tmp_path / "run", keep=1)
    manager.save(1, X).finish()
    (tmp_path / "run" / "1").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "1").symlink_to(tmp_path / "elsewhere")
    assert_same(manager.restore(1, like=X), X)
    manager.save(2, X).finish()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["2"]
    assert (tmp_path / "elsewhere" / "integrity.json").exists()


def test_a_step_that_its_run_removes_meanwhile_is_not_called_damaged(tmp_path, monkeypatch):
    """Sampling from a run that goes on: what was the newest step when reading began has gone."""
    cfg = DecoderConfig(layers=1, width=16, heads=2, kv_heads=2, head_width=8, mlp=16, vocab=32)
    layout = sharding.layout(MeshSpec(data=1).build(jax.devices()[:1]))
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), decoder.parts(cfg).abstract)
    run, load = CheckpointManager(tmp_path / "checkpoints", keep=1), orbax_io.load
    run.save(1, {"params": params}).finish()

    def late(folder, *args):
        if folder.name == "1":
            run.save(2, {"params": params}).finish()
        return load(folder, *args)

    monkeypatch.setattr(orbax_io, "load", late)
    assert run_folder.load_params(tmp_path, cfg, layout)[1] == 2
    gone = tmp_path / "checkpoints" / "2"
    record = read_record(gone)
    shutil.rmtree(gone)
    damage = find_damage(gone, record)
    assert damage and "was removed while it was read" in str(damaged(gone, damage))
