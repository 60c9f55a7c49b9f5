"""Training with a wire: against training without one, and what a codec does to a step."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from megajax.checkpoint.manager import CheckpointManager
from megajax.core.tree import named_leaves
from megajax.training import resume
from megajax.training.loop import data_state
from tests.tiny import DEEPSEEK, MODEL, MQA, host_batch, on, run_config, step_of
from tests.tolerances import GRADIENTS, LOSSES

DEEP = dataclasses.replace(MQA, layers=4)  # more than the loops begin and end with
# A wire that rounds nothing: what is left of a difference is float32's own.
EXACT = dict(wire="sdp4bit", exchange__weights="float32", exchange__gradients="float32")
MESH = dict(mesh__node=2, mesh__data=2, mesh__tensor=2)
SHARDED = EXACT | dict(shard__zero="full", exchange__difference=False)
PIPE = dict(mesh__pipe=2, mesh__node=2, mesh__tensor=2)
EXPERT = dict(mesh__node=2, mesh__expert=2, mesh__context=2, mesh__data=1)


def make(model, **changes):
    return step_of(dataclasses.replace(run_config(**changes), model=model))


@functools.cache
def control(model, pieces=1):
    return train(model, mesh__data=1, train__accumulate=pieces)


def train(model, steps=3, **changes):
    """Returns (the first step's gradients, the losses)."""
    train_step, losses, gradients = make(model, optim__clip=0.0, **changes), [], None
    state = train_step.init(0)
    for i in range(steps):
        state, metrics = train_step.step(state, on(train_step, host_batch(i)))
        losses.append(float(metrics["loss"]))
        if i == 0:  # the first moment is (1 - beta1) times the first gradient
            gradients = jax.tree.map(lambda m: np.asarray(m) / 0.1, state.opt[0].mu)
    return gradients, losses


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param(DEEP, MESH | EXACT, id="streamed"),
        pytest.param(MODEL, PIPE | EXACT, id="pipeline"),
        pytest.param(MODEL, MESH | SHARDED, id="sharded", marks=pytest.mark.slow),
        pytest.param(
            DEEP, MESH | EXACT | dict(train__accumulate=4), id="accumulated", marks=pytest.mark.slow
        ),
        pytest.param(
            MQA, MESH | dict(shard__zero="optimizer", train__accumulate=2),
            id="no codec, accumulated", marks=pytest.mark.slow,
        ),
        pytest.param(
            DEEPSEEK, EXPERT | EXACT | dict(train__accumulate=2), id="experts, accumulated",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MQA, MESH | EXACT | dict(exchange__start_step=1, train__accumulate=2), id="gathered",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MODEL, MESH | SHARDED | dict(train__accumulate=2), id="sharded, twice",
            marks=pytest.mark.slow,
        ),
        pytest.param(DEEPSEEK, EXPERT | EXACT, id="experts", marks=pytest.mark.slow),
        pytest.param(MQA, MESH | EXACT, id="two layers", marks=pytest.mark.slow),
        pytest.param(
            DEEP, MESH | EXACT | dict(train__remat="none"), id="no remat", marks=pytest.mark.slow
        ),
        pytest.param(
            MQA, MESH | dict(shard__zero="optimizer"), id="no codec", marks=pytest.mark.slow
        ),
        pytest.param(
            MODEL, PIPE | dict(shard__zero="optimizer"), id="no codec, pipeline",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MODEL, MESH | EXACT | dict(optim__name="lamb"), id="lamb", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_a_wire_that_rounds_nothing_changes_nothing(model, changes):
    gradients, losses = train(model, **changes)
    # A router's penalty is that of a micro-batch.
    pieces = changes.get("train__accumulate", 1) if model is DEEPSEEK else 1
    plain_losses, expected = control(model, pieces)
    assert apart(gradients, plain_losses) < GRADIENTS
    plain = "optim__name" not in changes
    np.testing.assert_allclose(
        losses[: 3 if plain else 1], expected[: 3 if plain else 1], atol=LOSSES
    )


def test_without_a_wire_there_is_nothing_of_one():
    plain = make(MODEL, **MESH)
    state = plain.abstract_state
    assert (
        plain.exchange is None
        and plain.storage.exchange == {}
        and state.copies is state.errors is None
    )


def apart(a, b):
    """The largest relative L2 distance of two leaves."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    norms = [(np.asarray(x), np.asarray(y)) for x, y in pairs]
    return max(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30) for x, y in norms)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param(MODEL, MESH | dict(wire="sdp4bit"), id="sdp4bit"),
        pytest.param(
            DEEP, MESH | dict(wire="sdp4bit"), id="sdp4bit, more layers", marks=pytest.mark.slow
        ),
        pytest.param(MODEL, MESH | dict(wire="loco"), id="loco", marks=pytest.mark.slow),
        pytest.param(
            MODEL,
            PIPE | dict(wire="loco", mesh__data=1),
            id="loco, pipeline",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_few_bits_train_and_a_killed_run_goes_on_bit_for_bit(tmp_path, model, changes):
    """A device with other bits is seen, and a resume says what it made again."""
    cfg = dataclasses.replace(run_config(**changes), model=model)
    train_step, checkpoints = step_of(cfg), CheckpointManager(tmp_path)
    state, losses = train_step.init(0), []
    for i in range(4):
        if i == 2:
            run = types.SimpleNamespace(
                train_step=train_step, identity={}, loader=types.SimpleNamespace(position=32)
            )
            checkpoints.save(2, vars(state), data_state=data_state(run)).finish()
        state, metrics = train_step.step(state, on(train_step, host_batch(i)))
        losses.append(float(metrics["loss"]))
        assert np.isfinite(metrics["leaf_norms"]).all()
    expected = control(model)[1]
    np.testing.assert_allclose(losses[:3], expected, atol=6e-3)
    assert not np.allclose(losses[:3], expected, atol=1e-6)  # the codec was there
    if cfg.wire == "sdp4bit":
        assert 0 < metrics["wire_drift_relative"] < 0.05

    def begin(step=train_step):
        return resume.begin(cfg, step, CheckpointManager(tmp_path), {})

    start = begin()
    assert (start.how, start.rows) == ("resumed after step 2", 32)
    again = start.state
    for i in (2, 3):
        again, _ = train_step.step(again, on(train_step, host_batch(i)))
    assert same(again, state)
    storage = dataclasses.replace(
        train_step.storage, exchange={"copies": "x", "errors": "of a mesh"}
    )
    other = begin(dataclasses.replace(train_step, storage=storage))
    notes = {
        "sdp4bit": "copies of the weights are made again (it has float32 ones)",
        "loco": "errors of gradients begin at 0 (another mesh or codec)",
    }
    assert notes[cfg.wire] in other.how
    first = train_step.init_exchange(other.state.params)
    assert same((other.state.copies, other.state.errors), first)
    assert set(map(bool, jax.tree.leaves(train_step.agree(state)))) == {True}
    bad, where = damaged(state)
    differ = [n for n, same in named_leaves(train_step.agree(bad)) if not bool(same)]
    assert differ == [where]


def damaged(state):
    """Returns (the state with one bit of one device's copy of a leaf changed, the leaf's name)."""
    tree = state.params if state.copies is None else state.copies
    leaves, treedef = jax.tree.flatten(tree)
    # The first leaf of which the most devices have the same part.
    parts = [len({str(s.index) for s in x.addressable_shards}) for x in leaves]
    index = parts.index(min(parts))
    x = leaves[index]
    parts = [np.array(s.data) for s in x.addressable_shards]
    parts[5].reshape(-1)[3] = np.nextafter(parts[5].reshape(-1)[3], 9)
    parts = [jax.device_put(p, s.device) for p, s in zip(parts, x.addressable_shards, strict=True)]
    leaves[index] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    part = "params" if state.copies is None else "copies"
    name = f"{part}.{named_leaves(tree)[index][0]}"
    return dataclasses.replace(state, **{part: treedef.unflatten(leaves)}), name


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
