"""How many loss chunks a run takes when it leaves that to the cost model."""

import dataclasses

import pytest

from megajax.core import config
from megajax.core.hardware import CARDS
from megajax.cost import memory
from megajax.models.decoder_config import PRESETS
from megajax.training.config import Config
from megajax.training.shape import ROOM, step_shape, with_chunks

ONE = dict.fromkeys(("pipe", "node", "data", "expert", "context", "tensor"), 1)
CFG = config.override(
    Config(model=PRESETS["llama3_1b"]()),
    {
        "train.loss_chunks": 0, "train.global_batch": 8, "train.seq_len": 4096,
        "train.dtype": "bfloat16", "train.remat": "dots",
    },
)  # fmt: skip


def needed(chunks):
    step = step_shape(CFG, ONE, fused_attention=True)
    return memory.bound(memory.terms(dataclasses.replace(step, loss_chunks=chunks)))


@pytest.mark.parametrize("kind", ["H100", "H200"])
def test_the_fewest_chunks_that_fit(kind):
    """The 1.2B decoder's 34 GB of logits and gradients fit an H200 beside all else, no H100."""
    card = CARDS[kind]
    chosen = with_chunks(CFG, ONE, card).train.loss_chunks
    assert needed(chosen) <= ROOM * card.memory_bytes
    assert chosen == 1 or needed(chosen // 2) > ROOM * card.memory_bytes
    assert chosen == {"H100": 2, "H200": 1}[kind]


def test_what_is_asked_for_stays_and_a_cpu_takes_one():
    three = config.override(CFG, {"train.loss_chunks": 4})
    assert with_chunks(three, ONE, CARDS["H100"]) is three
    assert with_chunks(CFG, ONE, None).train.loss_chunks == 1
    small = dataclasses.replace(CARDS["H100"], memory_bytes=2**30)
    assert with_chunks(CFG, ONE, small).train.loss_chunks == 64  # nothing fits: the most
