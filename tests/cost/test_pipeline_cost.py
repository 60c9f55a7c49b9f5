"""Closed forms of a pipeline against the tick tables that run, and their lockstep times."""

import dataclasses
import itertools

import pytest

from megajax.core.hardware import parse_cluster
from megajax.cost.estimate import estimate
from megajax.cost.roofline import Roofline
from megajax.cost.step import Pipeline, StepShape, passes
from megajax.models.decoder_config import PRESETS
from megajax.schedule import build
from megajax.schedule.simulator import lockstep

CASES = [
    (schedule, stages, times * stages, chunks)
    for schedule, stages, chunks, times in itertools.product(
        build.BUILDERS, (2, 4, 8), (1, 2, 3), (1, 2, 3)
    )
    if chunks == 1 or schedule in ("gpipe", "interleaved")
]


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "chunks"), CASES)
def test_ticks_and_bubble_are_those_of_the_table(schedule, stages, microbatches, chunks):
    table = build.BUILDERS[schedule](stages, microbatches, chunks)
    pipeline = Pipeline(stages, microbatches, chunks, schedule)
    counted: dict[str, int] = {}
    for phase in table.phases:
        for kind in phase.kinds:
            counted[kind] = counted.get(kind, 0) + phase.ticks
    assert pipeline.ticks == counted
    assert pipeline.live_inputs == max(table.live())
    model = dataclasses.replace(PRESETS["nano"](), layers=stages * chunks)
    sizes = {"pipe": stages, "node": 1, "data": 1, "expert": 1, "context": 1, "tensor": 1}
    for remat, stash in itertools.product(("none", "outputs"), ("input", "residuals")):
        step = StepShape(
            model.workload(microbatches, 128),
            sizes,
            (),
            remat=remat,
            pipeline=dataclasses.replace(pipeline, stash=stash),
        )
        cluster = parse_cluster("h100:1x8")
        estimated = estimate(step, cluster, ())
        # The seconds of a stage's kinds for one micro-batch, from operations alone.
        seconds = dict.fromkeys(counted, 0.0)
        for op in step.forward.ops:
            if op.part not in ("embedding", "head"):
                once = op.count * Roofline().op_time(op, cluster.card, "bfloat16")[0]
                for kind, times in passes(op.part, remat, step.pipeline).items():
                    seconds[kind] += once * times / microbatches
        for idle in ("mask", "skip"):
            busy = lockstep(table, seconds, idle)
            assert (idle == "skip") == (not busy.masked)
            share = busy.bubble_fraction / (1 - busy.bubble_fraction)
            assert estimated.bubble == pytest.approx(share)
            assert estimated.bubble_s == pytest.approx(busy.bubble_fraction * busy.makespan)
    skips = dataclasses.replace(step, pipeline=dataclasses.replace(step.pipeline, idle="skip"))
    assert estimate(skips, cluster, ()) == estimated
    assert skips.workload == step.workload
    assert skips.masked.flops == 0 < step.masked.flops


def test_one_stage_has_no_bubble():
    assert Pipeline().ticks == {"F": 1, "B": 1} and not Pipeline().is_split


def test_a_split_backward_pass_goes_through_the_chain_twice():
    """Of a product with weights: gradient of the input in B, again and of the weights in W."""
    split = Pipeline(4, 8, 1, "zero_bubble", "residuals")
    assert passes("input", "none", split) == {"F": 1, "B": 1, "W": 2}
    assert passes("attention", "none", split) == {"F": 1, "B": 2, "W": 2}
    assert passes("input", "full", dataclasses.replace(split, stash="input")) == {
        "F": 1,
        "B": 3,
        "W": 4,
    }
    assert passes("input", "none", Pipeline(4, 8, 1, "1f1b", "residuals")) == {"F": 1, "B": 2}
    assert passes("input", "none", Pipeline(4, 8, 1, "1f1b")) == {"F": 1, "B": 3}
