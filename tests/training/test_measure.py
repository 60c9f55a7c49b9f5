"""The sample that is written beside training: the engine's, whatever the mesh and the sharding."""

import gc
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from megajax.data.tokenizer import ByteTokenizer
from megajax.training.evaluate import Measure
from megajax.training.step import make_train_step
from tests.plain_loop import one_by_one
from tests.tiny import host_batch, on, run_config

NOTHING = SimpleNamespace()
VOCAB = {
    "train__dtype": "float32",
    "model__vocab": 272,
    "eval__sample_tokens": 9,
    "eval__temperature": 0.0,
}


def sampler_of(**changes):
    cfg = run_config(**VOCAB, **changes)
    step = make_train_step(cfg, cfg.mesh.build())
    return step, Measure(cfg, step, [], ByteTokenizer(), NOTHING, NOTHING, NOTHING, lambda: [])


def expected_text(cfg, params):
    prompt = [256, *cfg.eval.prompt.encode()]
    copy = jax.tree.map(lambda x: jax.device_put(np.asarray(x)), params)
    ids = one_by_one(cfg.model, prompt, 9, 32, copy)
    return cfg.eval.prompt + ByteTokenizer().decode(ids[: ids.index(257)] if 257 in ids else ids)


def nbytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh__tensor": 2},
        pytest.param({"mesh__pipe": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"mesh__pipe": 2, "mesh__tensor": 2, "pipeline__schedule": "interleaved"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"shard__zero": "hybrid", "mesh__node": 2}, marks=pytest.mark.slow),
        pytest.param({"shard__zero": "optimizer", "mesh__tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"model__moe__experts": 4, "mesh__expert": 2}, marks=pytest.mark.slow),
        pytest.param({"mesh__context": 2}, marks=pytest.mark.slow),
    ],
)
def test_sampling_beside_training_is_the_plain_loops_and_leaves_no_memory_behind(changes):
    step, measure = sampler_of(**changes)
    state = step.init(0)
    batch = on(step, host_batch(0))
    for _ in range(2):
        state, _ = step.step(state, batch)
        held = nbytes()
        text = measure.sample(state)
        assert nbytes() == held
        assert text == expected_text(measure._cfg, step.storage.natural(state.params))
