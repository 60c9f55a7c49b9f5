"""How many loss chunks a run takes when it leaves that to the cost model."""

import dataclasses
from unittest import mock

import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.cost import memory
from megajax.models.decoder_config import PRESETS
from megajax.training import step
from megajax.training.config import Config
from megajax.training.finetune import nano, nano_mlm
from megajax.training.shape import ROOM, step_shape, with_chunks
from tests.tiny import run_config

ONE = dict.fromkeys(("pipe", "node", "data", "expert", "context", "tensor"), 1)
CFG = config.override(
    Config(model=PRESETS["llama3_1b"]()),
    {
        "train.loss_chunks": 0, "train.global_batch": 8, "train.seq_len": 4096,
        "train.dtype": "bfloat16", "train.remat": "dots",
    },
)  # fmt: skip


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


def test_the_step_asks_the_gpu(monkeypatch):
    """What the GPU has decides, not what the card of its name has."""
    asked = []
    monkeypatch.setattr(step, "memory_bytes", lambda mesh: asked.append(mesh) or 2**20)
    cfg = run_config(train__loss_chunks=0)
    seen = mock.Mock(side_effect=with_chunks)
    monkeypatch.setattr(step, "with_chunks", seen)
    mesh = cfg.mesh.build()
    step.make_train_step(cfg, mesh)
    assert asked == [mesh] and seen.call_args.args[2] == 2**20
