"""A vision tower in the pipeline's idle slots, through the run's configuration and train step."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.schedule.simulator import lockstep
from megajax.training import vision
from megajax.training.config import TrainConfig
from megajax.training.step import make_train_step
from tests.tiny import on
from tests.tolerances import GRADIENTS, LONG_LOSSES, NORMS
from tests.vision_rows import MODEL, batch_of

BUBBLES = {"encoder.schedule": "bubbles", "mesh.pipe": 4, "mesh.node": 1, "mesh.data": 2}


def changed(base, *more, **changes):
    changes = {k.replace("__", "."): v for k, v in changes.items()}
    return config.override(base, {k: v for d in (*more, changes) for k, v in d.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.pipe": 1}, "encoder.schedule=bubbles: mesh.pipe=1 .*--mesh.pipe=2 or more"),
        ({"pipeline.idle": "mask"}, "pipeline.idle=mask .*use --pipeline.idle=skip"),
        (
            {"mesh.tensor": 2, "mesh.data": 1, "mesh.pipe": 4, "encoder.tensor": "whole"}
            | {"train.global_batch": 8},
            "encoder.tensor=whole: the 2 tensor ranks .*divisible by 16; nearest: 16.*--train.glob",
        ),
        (
            {"pipeline.schedule": "gpipe", "pipeline.chunks": 2, "pipeline.microbatches": 6}
            | {"train.global_batch": 12, "model.decoder.layers": 8},
            "multiple.*pipeline.microbatches",
        ),
    ],
)
def test_what_no_bubble_can_hold_is_refused(changes, message):
    cfg = changed(vision.nano(), BUBBLES, changes)
    with pytest.raises(UserError, match=message):
        cfg.check(cfg.mesh.sizes(8))


def test_segments_that_do_not_divide_the_tower_are_refused():
    cfg = changed(vision.nano(), BUBBLES, encoder__segments=3)
    with pytest.raises(
        UserError, match="encoder.segments=3 must divide tower.layers=2.*nearest: 2"
    ):
        cfg.task().parts()


def test_the_schedule_is_drawn_and_saves_ticks(tmp_path):
    """Nano on four stages: as many segments as make one about as long as a chunk."""
    cfg = changed(vision.nano(), BUBBLES)
    made = vision.schedules(cfg)
    assert cfg.segments in (1, 2) and abs(cfg.tower_chunks() / cfg.segments - 1) < 0.7
    assert made["bubbles"][1].makespan < 0.85 * made["inline"][1].makespan
    assert made["bubbles"][1].bubble_fraction < made["inline"][1].bubble_fraction
    frozen = vision.schedules(changed(cfg, train__freeze="tower"))["bubbles"]
    assert {slot.kind for slot in frozen[0].slots} == {"F", "B", "EF"}
    # With one unit for all work: 24, where the encoder before stage 0 would make it 32.
    table = vision.schedules(changed(cfg, encoder__segments=1))["bubbles"][0]
    assert lockstep(table, dict.fromkeys(("F", "B", "EF", "EB"), 1.0), "skip").makespan == 24


# ---- training


S, P = 32, 64


def run_config(**changes):
    base = dataclasses.replace(
        vision.nano(),
        model=dataclasses.replace(
            MODEL, decoder=dataclasses.replace(MODEL.decoder, layers=4), tower=MODEL.tower
        ),
        train=TrainConfig(steps=20, global_batch=16, seq_len=S),
        data=vision.VisionDataConfig(patches=P),
        optim=vision.OptimConfig(lr=2e-3, warmup=2),
        mesh=MeshSpec(),
    )
    return changed(base, **changes)


@functools.cache
def step_of(**changes):
    cfg = run_config(**changes)
    return make_train_step(cfg, cfg.mesh.build())


def run(step, steps=20):
    """Losses, norms of all leaves' gradients, and the gradients of the first step."""
    state, losses, norms = step.init(0), [], []
    grads = step.gradients(state, on(step, batch_of(0))).grads
    for i in range(steps):
        state, metrics = step.step(state, on(step, batch_of(i % 2)))
        losses.append(float(metrics["loss"]))
        norms.append(dict(zip(step.leaf_names, map(float, metrics["leaf_norms"]), strict=True)))
    return losses, norms, dict(named_leaves(jax.device_get(step.storage.natural(grads))))


@functools.cache
def control():
    return run(step_of(mesh__data=1))


MESHES = {
    "pipe 4 x data 2": dict(mesh__pipe=4, mesh__data=2),
    "pipe 2 x data 2 x tensor 2": dict(mesh__pipe=2, mesh__data=2, mesh__tensor=2),
    "inline, pipe 4 x data 2": dict(mesh__pipe=4, mesh__data=2, encoder__schedule="inline"),
    "whole over tensor": dict(mesh__pipe=2, mesh__data=1, mesh__tensor=2, encoder__tensor="whole"),
    "interleaved, residuals stashed": dict(
        mesh__pipe=2,
        mesh__data=2,
        pipeline__schedule="interleaved",
        pipeline__chunks=2,
        pipeline__stash="residuals",
    ),
    "optimizer state cut": dict(mesh__pipe=2, mesh__data=4, shard__zero="optimizer"),
    "eight microbatches": dict(
        mesh__pipe=2, mesh__data=1, pipeline__microbatches=8, encoder__segments=2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_as_one_device_does(mesh):
    """Loss and every leaf over 20 steps; rows with no image, one and three."""
    losses, norms, grads = run(step_of(**{"encoder__schedule": "bubbles"} | MESHES[mesh]))
    want, their_norms, theirs = control()
    np.testing.assert_allclose(losses, want, atol=LONG_LOSSES)
    for ours, one in zip(norms, their_norms, strict=True):
        assert ours.keys() == one.keys()
        for name, norm in ours.items():
            assert abs(norm - one[name]) < NORMS * one[name] + 1e-9, name
    for name, x in theirs.items():
        assert np.linalg.norm(grads[name] - x) < GRADIENTS * np.linalg.norm(x), name


@pytest.mark.slow
def test_four_bit_communication_trains_alike():
    """--wire=sdp4bit rounds what data-parallel ranks send, encoder or not: inline and bubbles
    differ by less than rounding changes the loss."""
    wire = dict(mesh__pipe=2, mesh__data=4, wire="sdp4bit")
    bubbles = run(step_of(**wire, encoder__schedule="bubbles"))[0]
    inline, plain = run(step_of(**wire))[0], control()[0]
    np.testing.assert_allclose(bubbles, inline, atol=2e-2)
    np.testing.assert_allclose(bubbles, plain, atol=5e-2)
    assert bubbles[-1] < bubbles[0] - 0.1


@pytest.mark.slow
def test_a_thousand_steps_of_changing_tables_compile_once():
    """Which microbatches have images changes at random; each order is planned on the host."""
    step = step_of(encoder__schedule="bubbles", mesh__pipe=4, mesh__data=2)
    rng, state, batch = np.random.default_rng(0), step.init(0), batch_of(1)
    program = step.step.__wrapped__
    for _ in range(1000):
        images = batch["images"].copy()
        images[rng.random(len(images)) < 0.6] = -1
        state, metrics = step.step(state, on(step, batch | {"images": images}))
    assert program._cache_size() == 1 and np.isfinite(float(metrics["loss"]))
