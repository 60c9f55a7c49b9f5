"""Small configurations and batches that several tests share."""

import dataclasses
import functools

import jax
import numpy as np

from megajax.core import config
from megajax.layers.latent import LatentConfig
from megajax.layers.moe import MoeConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.training.config import Config, EvalConfig, TrainConfig
from megajax.training.optim import OptimConfig
from megajax.training.step import TrainStep, make_train_step

MODEL = DecoderConfig(
    layers=2, width=32, heads=4, kv_heads=4, head_width=8, mlp=64, vocab=61, vocab_multiple=16
)
# Everything that differs from MODEL: each option of the decoder is on in one of the two.
RICH = dataclasses.replace(
    MODEL,
    kv_heads=4,
    block="parallel",
    norm="layer",
    position="learned",
    max_positions=32,
    activation="gelu",
    bias="all",
    qk_norm=True,
    window=5,
    tied=False,
)
# One key-value head, which tensor ranks share.
MQA = dataclasses.replace(RICH, kv_heads=1)
# Experts in MODEL's place, as Mixtral has them, and with everything that DeepSeek-V3 adds.
MOE = dataclasses.replace(MODEL, moe=MoeConfig(experts=8, top_k=2, width=32, z_loss=1e-3))
DEEPSEEK = dataclasses.replace(
    MODEL,
    block="parallel",
    moe=MoeConfig(
        experts=8,
        top_k=3,
        width=16,
        shared=2,
        score="sigmoid",
        scale=2.5,
        groups=4,
        top_groups=2,
        bias_rate=1e-3,
    ),
)
# DeepSeek-V3 whole: latent attention, a dense layer first. GPT-OSS: sinks, biases, two kinds of
# layers.
LATENT = dataclasses.replace(
    MODEL,
    head_width=12,
    latent=LatentConfig(rank=16, query_rank=24, rotary=4, value=8),
    moe=dataclasses.replace(DEEPSEEK.moe, shared=1, dense_layers=1, dense_width=48),
)
SINKS = dataclasses.replace(
    MODEL,
    kv_heads=2,
    bias="all",
    sinks=True,
    pattern="wf",
    window=5,
    activation="swiglu_clamped",
    moe=MoeConfig(experts=4, top_k=2, width=32),
)


def run_config(**changes) -> Config:
    """A run of 20 steps of 16 rows of 16 tokens; changes by dotted names, '__' for the dot."""
    base = Config(
        model=MODEL,
        train=TrainConfig(steps=20, global_batch=16, seq_len=16),
        optim=OptimConfig(lr=3e-3, warmup=2),
        eval=EvalConfig(sample_tokens=0),
    )
    return config.override(base, {k.replace("__", "."): v for k, v in changes.items()})


@functools.cache
def step_of(cfg: Config) -> TrainStep:
    """The train step of a configuration: the tests of a process trace and compile it once.

    A test that replaces parts of megajax makes a train step of its own.
    """
    return make_train_step(cfg, cfg.mesh.build())


def host_batch(number: int, rows: int = 16, seq: int = 16, vocab: int = 61) -> dict:
    """A learnable packed batch with segments and some targets that do not count."""
    random = np.random.default_rng(number)
    walk = random.integers(0, 5, (rows, seq + 1)).cumsum(1) % vocab
    cut = random.integers(1, seq, (rows, 1))
    second = np.arange(seq) >= cut
    positions = np.arange(seq) - np.where(second, cut, 0)
    counts = random.random((rows, seq)) > 0.5 * random.random((rows, 1))
    batch = {
        "tokens": walk[:, :-1],
        "targets": np.where(counts, walk[:, 1:], -1),
        "segments": second + 1,
        "positions": positions,
    }
    return {k: v.astype(np.int32) for k, v in batch.items()}


def on(train_step, host: dict) -> dict:
    """The batch on the devices of a train step, in its order and cut into its micro-batches."""
    order = slice(None) if train_step.storage.tokens is None else train_step.storage.tokens
    return {
        k: jax.device_put(host[k][:, order].reshape(like.shape), like.sharding)
        for k, like in train_step.abstract_batch.items()
    }
