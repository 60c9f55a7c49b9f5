"""Rows that are held in another order than the model's: stored so, and put in order by readers."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import offline, trust
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.checkpoint.sealing import Fingerprints
from megajax.checkpoint.trust import CheckpointError, DamagedError
from megajax.core.boxes import Run, runs

LAYERS = 8
NAME = "params.blocks.query"
# The layers as two stages of two chunks, and four of two, hold them.
TWO = np.arange(LAYERS).reshape(2, 2, -1).transpose(1, 0, 2).ravel()
FOUR = np.arange(LAYERS).reshape(2, 4, -1).transpose(1, 0, 2).ravel()
PLAIN = np.arange(LAYERS)


def values(seed):
    """What the model has, in its order."""
    random = np.random.default_rng(seed)
    return {
        "params": {
            "blocks": {"query": random.standard_normal((LAYERS, 6, 16)).astype(np.float32)},
            "embed": random.standard_normal((32, 4)).astype(np.float32),
        },
        "step": np.int32(seed % 7),
    }


def placed(state, order, stages):
    """The state on a mesh, its layers held in an order and cut by stages."""
    mesh = jax.make_mesh((stages, 8 // stages), ("pipe", "data"))

    def place(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    params = state["params"]
    query = place(params["blocks"]["query"][order], P("pipe", None, "data"))
    params = {"blocks": {"query": query}, "embed": place(params["embed"], P("data"))}
    return {"params": params, "step": place(state["step"], P())}


def of(order):
    return {NAME: order}


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: (np.asarray(x) == np.asarray(y)).all(), a, b))


def test_runs_are_what_can_be_copied_at_once():
    assert runs([]) == [] and runs([3, 4, 5]) == [Run(0, 3, 3)]
    assert runs(TWO) == [Run(0, 0, 2), Run(2, 4, 2), Run(4, 2, 2), Run(6, 6, 2)]


def test_a_fingerprint_is_of_the_model_and_not_of_the_order(seed):
    x = values(seed)["params"]["blocks"]["query"]
    (good,) = Fingerprints([x]).local()
    for order, stages in ((TWO, 2), (FOUR, 4)):
        held = placed(values(seed), order, stages)["params"]["blocks"]["query"]
        for y in (held, x[order]):
            assert Fingerprints([y], orders=[order]).local() == [good]
            assert Fingerprints([y]).local() != [good]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Steps of one state: 1 in the model's order, 2 and 4 as so many stages hold it."""
    folder = tmp_path_factory.mktemp("stored")
    manager = CheckpointManager(folder, keep=0)
    for step, order in ((1, PLAIN), (2, TWO), (4, FOUR)):
        manager.save(step, placed(values(0), order, step if step > 1 else 2), order=of(order))
    manager.close()
    return folder


@pytest.mark.parametrize("step", [1, 2, 4])
def test_every_order_is_restored_into_every_other(stored, step):
    manager = CheckpointManager(stored, keep=0)
    for order, stages in ((PLAIN, 1), (TWO, 2), (FOUR, 4)):
        want = placed(values(0), order, stages)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want
        )
        restored = manager.restore(step, like=like, order=of(order))
        assert same(restored, want)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, want))
    on_host = jax.tree.map(np.asarray, values(0))
    assert same(manager.restore(step, like=on_host), values(0))
    quick = CheckpointManager(stored, keep=0, verify=None)
    assert same(
        quick.restore(step, like=on_host, order=of(FOUR))["params"]["blocks"]["query"],
        values(0)["params"]["blocks"]["query"][FOUR],
    )


def test_tools_show_the_model_and_not_the_order(stored):
    steps, _ = offline.open_folder(stored)
    records = {step: steps.record(step) for step in (1, 2, 4)}
    assert offline.differences(records[1], records[2]) == []
    for step, record in records.items():
        leaves = offline.StoredLeaves(steps.step(step), record)
        assert (leaves[NAME] == values(0)["params"]["blocks"]["query"]).all()
        CheckpointManager(stored, keep=0).verify(step)  # reads every byte back
    body = json.loads((stored / "1" / trust.RECORD).read_text())["record"]
    assert body["version"] == 1 and "order" not in body["leaves"][NAME]  # as before there were any
    body = json.loads((stored / "2" / trust.RECORD).read_text())["record"]
    assert body["version"] == 2 and body["leaves"][NAME]["order"] == TWO.tolist()
    assert "order" not in body["leaves"]["params.embed"]


def test_a_wrong_order_in_the_record_is_found(stored, tmp_path):
    """As if a writer had named another order than that of its arrays."""
    steps, _ = offline.open_folder(stored)
    record = steps.record(2)
    leaves = dict(record.leaves)
    leaves[NAME] = dataclasses.replace(leaves[NAME], order=FOUR.tolist())
    shutil.copytree(stored / "2", tmp_path / "2")
    trust.write_record(tmp_path / "2", dataclasses.replace(record, leaves=leaves))
    with pytest.raises(DamagedError, match="query"):
        CheckpointManager(tmp_path).restore(2, like=values(0))


def test_what_plain_orbax_wrote_is_in_the_models_order(tmp_path):
    import orbax.checkpoint.experimental.v1 as ocp

    ocp.save(str(tmp_path / "3"), placed(values(0), PLAIN, 2))
    want = placed(values(0), FOUR, 4)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want)
    assert same(CheckpointManager(tmp_path).restore(3, like=like, order=of(FOUR)), want)


@pytest.mark.parametrize("orders", [(TWO, 2, TWO, 2), (FOUR, 4, PLAIN, 1), (PLAIN, 1, FOUR, 4)])
def test_a_copy_in_memory_comes_back_in_any_order(tmp_path, orders):
    held, stages, target, other = orders
    writer = MemoryTier(tmp_path / "m", 0)
    writer.put(7, placed(values(0), held, stages), {"rows": 5}, of(held))
    writer.wait()
    want = placed(values(0), target, other)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want)
    step, restored, data = MemoryTier(tmp_path / "m", 1).take(like, None, of(target))
    assert (step, data) == (7, {"rows": 5}) and same(restored, want)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({NAME: [0] * LAYERS}, "must hold each of its"),
        ({NAME: [0, 1]}, "must hold each of its"),
        ({"params.blocks.key": TWO}, "names params.blocks.key, which is no leaf"),
    ],
)
def test_an_order_that_is_none(tmp_path, order, words):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        manager.save(1, values(0), order=order)
    assert manager.steps() == []


@pytest.mark.parametrize("order", [[0, 1], [0] * LAYERS, [-1, *range(1, LAYERS)], "01234567", 8])
def test_a_record_whose_order_is_none_is_damaged(stored, tmp_path, order):
    steps, _ = offline.open_folder(stored)
    record = steps.record(2)
    leaves = record.leaves | {NAME: dataclasses.replace(record.leaves[NAME], order=order)}
    trust.write_record(tmp_path, dataclasses.replace(record, leaves=leaves))
    with pytest.raises(DamagedError):
        trust.read_record(tmp_path)


def test_an_order_of_too_many_rows_takes_no_memory(tmp_path):
    leaf = trust.LeafSum([2**55, 4], "float32", [1, 2], [1, 0])
    trust.write_record(tmp_path, trust.Record(1, {}, {NAME: leaf}))
    with pytest.raises(DamagedError, match="order"):
        trust.read_record(tmp_path)
