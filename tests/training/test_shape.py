"""What a run takes that it leaves to the cost model, or to its data."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.cost import memory
from megajax.cost.step import MOMENTS
from megajax.models.decoder_config import PRESETS
from megajax.training import step
from megajax.training.config import Config
from megajax.training.finetune import nano, nano_mlm
from megajax.training.optim import NAMES
from megajax.training.shape import ROOM, resolved, step_shape, with_chunks, with_segments
from tests.tiny import run_config

ONE = dict.fromkeys(("pipe", "node", "data", "expert", "context", "tensor"), 1)
CFG = config.override(
    Config(model=PRESETS["llama3_1b"]()),
    {
        "train.loss_chunks": 0,
        "train.global_batch": 8,
        "train.seq_len": 4096,
        "train.dtype": "bfloat16",
        "train.remat": "dots",
    },
)


def needed(chunks):
    shape = step_shape(CFG, ONE, fused_attention=True)
    return memory.bound(memory.terms(dataclasses.replace(shape, loss_chunks=chunks)))


@pytest.mark.parametrize("kind", ["H100", "H200"])
def test_the_fewest_chunks_that_fit(kind):
    """The 1.2B decoder's 34 GB of logits and gradients fit an H200 beside all else, no H100."""
    card = CARDS[kind]
    chosen = with_chunks(CFG, ONE, card.memory_bytes).train.loss_chunks
    assert needed(chosen) <= ROOM * card.memory_bytes
    assert chosen == 1 or needed(chosen // 2) > ROOM * card.memory_bytes
    assert chosen == {"H100": 2, "H200": 1}[kind]


def test_what_is_asked_for_stays_and_a_cpu_takes_one():
    three = config.override(CFG, {"train.loss_chunks": 4})
    assert with_chunks(three, ONE, CARDS["H100"].memory_bytes) is three
    assert with_chunks(CFG, ONE, None).train.loss_chunks == 1
    assert with_chunks(CFG, ONE, 2**30).train.loss_chunks == 64  # nothing fits: the most


@pytest.mark.parametrize("preset", [nano, nano_mlm])
def test_an_encoder_may_leave_it_open(preset):
    cfg = config.override(preset(), {"train.loss_chunks": 0})
    assert with_chunks(cfg, ONE, CARDS["H100"].memory_bytes).train.loss_chunks == 1
    assert with_chunks(cfg, ONE, 2**20).train.loss_chunks == {nano: 48, nano_mlm: 64}[preset]
    assert step_shape(cfg, ONE, phase="prefill").load.phase == "prefill"
    with pytest.raises(UserError, match="encoder generates no tokens"):
        step_shape(cfg, ONE, phase="decode")


def test_dots_are_kept_where_the_estimate_says_that_they_fit():
    """Of the 1.2B decoder: on an H200, and on an H100 with logits in two pieces; not in 40 GB."""
    auto = config.override(CFG, {"train.remat": "auto"})
    for memory_bytes, remat, chunks in (
        (CARDS["H200"].memory_bytes, "dots", 1),
        (CARDS["H100"].memory_bytes, "dots", 2),
        (40 * 10**9, "outputs", None),
        (None, "outputs", 1),
    ):
        train = resolved(auto, ONE, memory_bytes).train
        assert train.remat == train.keeps == remat and chunks in (None, train.loss_chunks)
    fits = resolved(auto, ONE, CARDS["H100"].memory_bytes)
    need = memory.bound(memory.terms(step_shape(fits, ONE, fused_attention=True)))
    assert need <= ROOM * CARDS["H100"].memory_bytes
    nearly = resolved(auto, ONE, int(need / ROOM) - 2**20)  # less room: more pieces, or outputs
    assert nearly.train.remat == "outputs" or nearly.train.loss_chunks > 2
    fixed = config.override(auto, {"train.loss_chunks": 1})
    assert resolved(fixed, ONE, CARDS["H100"].memory_bytes).train.remat == "outputs"
    assert resolved(CFG, ONE, None).train.remat == "dots"  # what is asked for stays


class Documents:
    """Rows of 12 tokens that hold 1, 2, 3 or 4 documents, and a dead tail."""

    def __getitem__(self, i):
        ids = np.repeat(np.arange(1, i % 4 + 2), 2)
        return {"segments": np.pad(ids, (0, 12 - len(ids)), constant_values=-1)}


def test_slots_for_documents_are_counted_in_the_rows():
    """Mean 2.5 and deviation sqrt(1.25): a batch of many rows needs hardly more than the mean."""
    rows, deviation = Documents(), 1.25**0.5
    for batch, data in ((8, 1), (512, 1), (512, 8)):
        cfg = config.override(CFG, {"train.global_batch": batch})
        room = with_segments(cfg, rows, ONE | {"data": data}).train.segments
        assert room == int(np.ceil(2.5 + 8 * deviation / np.sqrt(batch / data)))
    asked = config.override(CFG, {"train.segments": 7})
    assert with_segments(asked, rows, ONE) is asked
    one = [{"segments": np.ones(12, np.int32)}] * 256
    assert with_segments(CFG, one, ONE).train.segments == 2  # cuDNN's least
    images = np.repeat([0, 1, 2, 3, 4, -1], 2)  # the segments of a tower's attention
    shown = [row | {"images": images} for row in one]
    assert with_segments(CFG, shown, ONE).train.segments == 5


def test_the_step_asks_the_gpu(monkeypatch):
    """What the GPU has decides, not what the card of its name has."""
    asked = []
    monkeypatch.setattr(step, "memory_bytes", lambda mesh: asked.append(mesh) or 2**20)
    cfg = run_config(train__loss_chunks=0)
    seen = mock.Mock(side_effect=resolved)
    monkeypatch.setattr(step, "resolved", seen)
    mesh = cfg.mesh.build()
    step.make_train_step(cfg, mesh)
    assert asked == [mesh] and seen.call_args.args[2] == 2**20


def test_the_moments_of_every_optimizer_are_known():
    assert set(MOMENTS) == set(NAMES)
    shape = step_shape(CFG, ONE)
    with pytest.raises(AssertionError, match="'sophia'.*MOMENTS"):
        dataclasses.replace(shape, optimizer="sophia")
