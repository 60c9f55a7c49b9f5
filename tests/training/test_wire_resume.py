"""What a run with a wire makes of a checkpoint that another one left: on another mesh, with another
wire or none, from storage, from memory, and from weights that no run made."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.core.tree import named_leaves
from megajax.training import resume
from megajax.training.loop import data_state
from tests.tiny import run_config, step_of

HERE = dict(mesh__node=2, mesh__data=2, mesh__tensor=2)
THERE = dict(mesh__node=1, mesh__data=4, mesh__tensor=2)
PIPE = dict(mesh__pipe=2, mesh__node=2, mesh__data=1, mesh__tensor=2)
SDP, LOCO, NONE = dict(wire="sdp4bit"), dict(wire="loco"), dict(wire="none")
HALF = dict(train__dtype="bfloat16")
COPIES, ERRORS = "copies of the weights are made again", "errors of gradients begin at 0"


def train_step(changes):
    return step_of(run_config(**changes))


@functools.cache
def left(changes):
    """Returns (the state that a run leaves after step 3, what it says of it): its copies lack
    something of the masters, and its errors are not zero. changes: pairs, sorted."""
    step = train_step(dict(changes))
    state = step.init(1)
    copies = jax.tree.map(lambda x: x + jnp.asarray(0.125, x.dtype), state.copies)
    errors = jax.tree.map(lambda x: x + jnp.asarray(1, x.dtype), state.errors)
    state = dataclasses.replace(state, step=state.step + 3, copies=copies, errors=errors)
    loader = types.SimpleNamespace(position=48)
    run = types.SimpleNamespace(train_step=step, identity={}, loader=loader)
    return state, data_state(run)


@pytest.fixture(params=["storage", "memory"])
def resumed(request, tmp_path):
    """(changes of a run, of the run after it) -> (how it begins, the state left, the new one)."""

    def begin(before, after):
        state, data = left(tuple(sorted(before.items())))
        rows, manager, memory = train_step(before).rows, CheckpointManager(tmp_path), None
        if request.param == "storage":
            manager.save(3, state, data_state=data, order=rows).result()
        else:
            tier = MemoryTier(tmp_path / "tier", 0)
            tier.put(3, state, data, rows)
            tier.wait()
            memory = MemoryTier(tmp_path / "tier", 1)
        start = resume.begin(run_config(**after), train_step(after), manager, {}, memory)
        first = f"resumed after step 3{', from memory' * (memory is not None)}"
        assert start.how.startswith(first) and start.rows == 48
        return start.how.removeprefix(first), state, start.state

    return begin


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(HERE | SDP, HERE | SDP, "", id="the same"),
        pytest.param(HERE | SDP, THERE | SDP, "", id="another mesh"),
        pytest.param(HERE | SDP, PIPE | SDP, "", id="stages", marks=pytest.mark.slow),
        pytest.param(PIPE | SDP, HERE | SDP, "", id="no stages", marks=pytest.mark.slow),
        pytest.param(
            HERE | SDP, THERE | SDP | HALF, f"; {COPIES} (it has float32 ones)", id="another type"
        ),
        pytest.param(HERE | NONE, HERE | SDP, f"; {COPIES} (it has none)", id="from none"),
        pytest.param(
            HERE | SDP, THERE | NONE, "; its copies of the weights are not needed", id="to none"
        ),
        pytest.param(
            HERE | SDP,
            HERE | LOCO,
            f"; its copies of the weights are not needed; {ERRORS} (it has none)",
            id="another wire",
        ),
        pytest.param(HERE | LOCO, HERE | LOCO, "", id="the same, errors"),
        pytest.param(
            HERE | LOCO, THERE | LOCO, f"; {ERRORS} (another mesh or codec)", id="errors, mesh"
        ),
        pytest.param(
            HERE | LOCO,
            PIPE | LOCO,
            f"; {ERRORS} (another mesh or codec)",
            id="errors, stages",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            HERE | LOCO,
            THERE | SDP,
            f"; {COPIES} (it has none); its errors of gradients are dropped",
            id="from errors",
        ),
    ],
)
def test_a_run_goes_on_from_what_another_left(resumed, before, after, said):
    """Masters and moments are those that were left; copies and errors too, or they are new ones,
    and what several devices hold has the same bits on all of them."""
    how, state, changes = resumed(before, after)
    assert how == said
    step, was = train_step(after), train_step(before)
    a, b = step.storage.natural(changes), was.storage.natural(state)
    assert same((a.params, a.opt, a.step), (b.params, b.opt, b.step))
    if changes.copies is not None and COPIES in said:
        assert same(changes.copies, cast(changes))
    elif changes.copies is not None:
        assert same(a.copies, b.copies) and not same(changes.copies, cast(changes))
    if changes.errors is not None:
        new, leaves = ERRORS in said, named_leaves(changes.errors)
        assert new or same(changes.errors, state.errors)
        assert {np.asarray(x).any() for n, x in leaves if not n.endswith("scales")} == {not new}
    likewise(step, changes)


@pytest.mark.parametrize("wire", [SDP, LOCO], ids=["copies", "errors"])
@pytest.mark.parametrize("origin", ["init_from", "import"])
def test_weights_that_no_run_made(tmp_path, origin, wire):
    """Their copies are of them, not of the weights that the run would have drawn."""
    step, manager = train_step(HERE | wire), CheckpointManager(tmp_path)
    state, _ = left(tuple(sorted((HERE | NONE).items())))
    params = jax.tree.map(lambda x: x + 1, state.params)
    cfg = run_config(**HERE, **wire)
    if origin == "import":
        data = {"imported": "a folder", "rows": 0}
        manager.save(0, {"params": params}, data_state=data).result()
    else:
        cfg = types.SimpleNamespace(
            train=cfg.train,
            lora=cfg.lora,
            init_from="a folder",
            given_params=lambda layout, fresh: params,
        )
    start = resume.begin(cfg, step, manager, {})
    notes = {"sdp4bit": "copies of the weights are made of them"}
    notes["loco"] = "errors of gradients begin at 0"
    how = "weights imported from a folder" if origin == "import" else "weights from a folder"
    assert start.how == f"{how}; {notes[wire['wire']]}" and start.rows == 0
    assert same(start.state.params, params)
    if wire == SDP:
        assert same(start.state.copies, cast(start.state))
    likewise(step, start.state)


def cast(state):
    """What first copies are: the masters in the type of the copies, None where there is none."""
    params = dict(named_leaves(state.params))
    return [np.asarray(params[n]).astype(x.dtype) for n, x in named_leaves(state.copies)]


def likewise(step, state):
    """Every leaf lies as the step wants it, and devices with the same part of it agree."""
    like = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), step.abstract_state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), state) == like
    for name, x in named_leaves(state):
        parts = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert parts.setdefault(str(shard.index), bits) == bits, name


def same(a, b):
    """Tells whether two trees of as many leaves have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
