"""Compiled for H100s: an encoder's slots hide the decoder's collectives and add none."""

import dataclasses
import re

import pytest

from megajax.core import config
from megajax.cost.hlo import Module, collectives
from megajax.models.decoder_config import DecoderConfig
from megajax.models.vit import VitConfig
from megajax.models.vlm import VlmConfig
from megajax.parallel.pipeline import ENTER, HEAD, LEAVE
from megajax.systems.aot import QUICK
from megajax.training import vision
from megajax.training.step import make_train_step
from pallas_kernels import aot

pytestmark = pytest.mark.aot

MODEL = VlmConfig(
    decoder=DecoderConfig(
        layers=4, width=1024, heads=8, kv_heads=8, head_width=128, mlp=2816, vocab=8192, tied=False
    ),
    tower=VitConfig(layers=4, width=1024, heads=8, mlp=4096),
    image_token=8191,
    mrope=None,
)
SEGMENTS, TICKS = 1, 8  # ticks of two stages and four microbatches


def compiled(**changes):
    """Returns (the compiled step on pipe 2 x tensor 4, sizes of the mesh)."""
    settings = {
        "train.global_batch": 16,
        "train.seq_len": 2048,
        "train.attention": "xla",
        "overlap": "xla",
        "data.patches": 2048,
        "mesh.pipe": 2,
        "mesh.tensor": 4,
        "mesh.data": 1,
        "pipeline.idle": "skip",
        "pipeline.microbatches": 4,
        "encoder.schedule": "bubbles",
        "encoder.segments": SEGMENTS,
    }
    changes = {k.replace("__", "."): v for k, v in changes.items()}
    base = dataclasses.replace(vision.qwen2_vl_2b(), model=MODEL)
    cfg = config.override(base, settings | changes)
    mesh = cfg.mesh.build(aot.devices(1))
    step = make_train_step(cfg, mesh)
    lowered = step.step.lower(step.abstract_state, step.abstract_batch)
    return aot.compile(lowered, QUICK), dict(mesh.shape)


def test_weights_whole_over_tensor():
    program, sizes = compiled(encoder__tensor="whole")
    text = program.as_text()
    sent = [c for c in collectives(text, sizes) if c.loops and c.loops[0] == TICKS]
    # The encoder sends nothing in the loop of ticks: its gradients are summed once, after it.
    assert not [c for c in sent if re.search("tower|projector", c.op_name)]
    # What goes over pipe is in no branch that a stage takes alone.
    over_pipe = [c for c in sent if "pipe" in c.axes]
    shared = re.compile("|".join((ENTER, HEAD, LEAVE)))
    alone = [c for c in over_pipe if not shared.search(c.op_name)]
    assert {c.kind for c in alone} == {"collective-permute"}
    assert sum(c.arrays for c in alone) == 2
    assert all(c.loops == (TICKS,) for c in alone)
    # Layers of both networks in one loop: the decoder's collectives run beside the encoder's work.
    starts = re.compile(r" (all-gather|reduce-scatter)(-start)?\(|async-start\(.*(all-g|reduce-s)")
    joint: dict[str, list[bool]] = {}
    for place in Module(text).places():
        if starts.search(place.line) and len(place.loops) == 2:
            if any("tower" in line for line in place.lines):
                later = [line for line in place.until_done() if " fusion(" in line]
                hides = any("tower" in line for line in later)
                joint.setdefault(place.computation, []).append(hides)
    forward, *backward = joint.values()  # F + EF; then both loops of B + EB
    assert forward == [True] * 4
    assert [len(loop) for loop in backward] == [4, 6]
    assert sum(map(sum, backward)) >= 8, backward
