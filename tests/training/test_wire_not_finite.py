"""A gradient that is not finite on one rank, through a whole step with a wire and the loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from megajax.checkpoint.manager import CheckpointManager
from megajax.monitor.meter import Meter, Work
from megajax.parallel.exchange import Exchange
from megajax.training.loop import NotFinite, Run, train
from megajax.training.step import make_train_step
from tests.tiny import MODEL, host_batch, on, run_config

MESH = dict(mesh__node=2, mesh__data=2, mesh__tensor=2)
PIPE = dict(mesh__pipe=2, mesh__node=2, mesh__data=1, mesh__tensor=2)
LEAF = "blocks.mlp.down"


class Loader:
    """Batches of a train step, and a recorder of its rows."""

    rows_per_batch = 16

    def __init__(self, train_step, position):
        self.train_step, self.position, self.rows = train_step, position, []

    def __next__(self):
        self.position += self.rows_per_batch
        return on(self.train_step, host_batch(self.position))

    def emit(self, step, row):
        self.rows.append((step, row))


def poison(monkeypatch):
    """From now on one element of LEAF's gradient is NaN on one device, before it is sent."""
    flat = Exchange._flat

    def poisoned(self, bucket, grads):
        grads, names = list(grads), [self.names[i] for i in bucket.leaves]
        for i in (i for i, name in enumerate(names) if LEAF.endswith(name)):
            last = [lax.axis_index(a) == n - 1 for a, n in self.masters.mesh.shape.items()]
            first = jnp.arange(grads[i].size).reshape(grads[i].shape) == 0
            grads[i] = jnp.where(jnp.stack(last).all() & first, jnp.nan, grads[i])
        return flat(self, bucket, grads)

    monkeypatch.setattr(Exchange, "_flat", poisoned)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(MESH | dict(wire="sdp4bit"), id="streamed"),
        pytest.param(MESH | dict(wire="loco"), id="loco", marks=pytest.mark.slow),
        pytest.param(PIPE | dict(wire="sdp4bit"), id="pipeline", marks=pytest.mark.slow),
        pytest.param(
            MESH | dict(wire="sdp4bit", shard__zero="full"), id="sharded", marks=pytest.mark.slow
        ),
    ],
)
def test_nan_on_one_rank_is_found_and_named_and_nothing_is_saved(monkeypatch, tmp_path, changes):
    """The one leaf is named and no other one; masters, moments and errors stay, bit for bit."""
    poison(monkeypatch)
    cfg = dataclasses.replace(run_config(checkpoint__every=1, **changes), model=MODEL)
    train_step = make_train_step(cfg, cfg.mesh.build())
    assert LEAF in train_step.leaf_names
    state = train_step.init(0)
    state = dataclasses.replace(state, step=state.step + 4)
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(4, vars(state), data_state={"rows": 64}).result()
    before = persistent(state)
    loader = Loader(train_step, 64)
    meter = Meter(Work(1, 1.0, 1.0, None), cfg.train.steps)
    run = Run(cfg, train_step, state, loader, checkpoints, tmp_path, loader, None, meter, {})
    count = len(train_step.leaf_names)
    with pytest.raises(NotFinite) as raised:
        train(run)
    said = str(raised.value)
    assert f"first non-finite gradient: {LEAF} (1 of {count} leaves)" in said
    assert said.startswith("step 5: loss is ") and "last good checkpoint: step 4" in said
    ((step, row),) = loader.rows
    assert step == 5 and np.isfinite(row["loss"]) and np.isnan(row["grad_norm"])
    assert checkpoints.steps() == [4]
    assert persistent(run.state) == before


def persistent(state):
    """The bytes of what a step that is refused may not change: all but copies of the weights."""
    leaves = jax.tree.leaves(dataclasses.replace(state, copies=None))
    return [np.asarray(x).tobytes() for x in leaves]
