"""DeepSeek-V3's and GPT-OSS's layers on meshes against one device."""

import dataclasses

import pytest

from tests.parallel import test_pipeline_moe
from tests.parallel.test_pipeline import poisoned
from tests.tiny import LATENT, SINKS

__all__ = ["poisoned"]  # the fixture, shared

SLOTS = dataclasses.replace(
    SINKS,
    moe=dataclasses.replace(SINKS.moe, mode="capacity", capacity_factor=0.8, share_slots=True),
)
ONE_QUERY = dataclasses.replace(
    LATENT,
    moe=dataclasses.replace(LATENT.moe, dense_layers=0),
    latent=dataclasses.replace(LATENT.latent, query_rank=None),
)
MODELS = {"deepseek": LATENT, "gpt_oss": SINKS, "gpt_oss slots": SLOTS, "one query": ONE_QUERY}
WIDE = dict(mesh__data=2, mesh__tensor=2, mesh__expert=2)
PIPE = dict(mesh__pipe=2, mesh__data=1, mesh__expert=2, mesh__tensor=2, pipeline__microbatches=2)
CUT = dict(mesh__data=2, mesh__context=2, mesh__tensor=2)


def seldom(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name, pieces, changes",
    [
        seldom("one query", 1, dict(mesh__data=2, mesh__tensor=2)),
        seldom("deepseek", 1, WIDE),
        seldom("deepseek", 1, CUT),
        seldom("deepseek", 2, PIPE),
        seldom("deepseek", 2, PIPE | dict(train__remat="none", pipeline__gradients="sharded")),
        seldom("gpt_oss", 1, WIDE),
        seldom("gpt_oss", 1, CUT),
        seldom("gpt_oss", 1, CUT | dict(context__kind="ulysses")),
        seldom("gpt_oss", 1, CUT | dict(context__kind="gather")),
        seldom("gpt_oss", 2, PIPE),
        seldom("gpt_oss slots", 2, PIPE),
    ],
)
def test_a_mesh_computes_what_one_device_does(name, pieces, changes, monkeypatch):
    monkeypatch.setitem(test_pipeline_moe.MODELS, name, MODELS[name])
    want = test_pipeline_moe.control(name, 3, pieces)
    test_pipeline_moe.compare(test_pipeline_moe.train(MODELS[name], 3, **changes), want)
