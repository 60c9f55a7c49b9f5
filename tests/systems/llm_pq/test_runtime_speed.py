"""The runtime on emulated devices of artificial speeds, against the event simulator."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from megajax.serving import SamplingParams
from megajax.systems.llm_pq import Placement, Problem, Runtime
from megajax.systems.llm_pq.problem import simulate
from tests.plain_loop import sharp
from tests.tiny import MODEL

CFG = dataclasses.replace(MODEL, layers=6, max_positions=64)
REQUESTS, PROMPT, NEW = 8, 8, 7
SIZES = (2, 4, 8)
# Seconds of a layer: device 1 is the fastest; more rows take longer, in prefill more than in
# decoding. Long beside the real work of a stage, some milliseconds.
SPEED_D = np.array([[1.5], [0.5], [1.0]])
PREFILL_S = {n: SPEED_D * 0.06 * n for n in SIZES}
DECODE_S = {n: SPEED_D * (0.16 + 0.008 * n) for n in SIZES}


def problem():
    none = dict.fromkeys(SIZES, 0.0)
    return Problem(
        bits=(16,), omega=np.zeros((CFG.layers, 1)), prefill_s=PREFILL_S, decode_s=DECODE_S,
        prefill_hop_s=none, decode_hop_s=none, layer_bytes=np.ones(1), cache_bytes=0,
        first_bytes=0, last_bytes=0, memory=np.full(3, 100.0), requests=REQUESTS,
        new_tokens=NEW,
    )  # fmt: skip


class Slow:
    """Makes every stage as slow as its device, from `on` on; a device does one thing at a time."""

    def __init__(self, placement):
        self.placement, self.on = placement, False
        self.overlapping = [threading.Lock() for _ in placement.stages]

    def __call__(self, stage, local):
        def run(params, state, x, tokens, *others):
            shape = tokens.positions_T.shape
            wait = lambda x: self.wait(stage, x)  # noqa: E731
            positions_T = jax.pure_callback(
                wait, jax.ShapeDtypeStruct(shape, "int32"), tokens.positions_T
            )
            tokens = dataclasses.replace(tokens, positions_T=positions_T)
            return local(params, state, x, tokens, *others)

        return run

    def wait(self, stage, positions_T):
        device, start, stop = self.placement.stages[stage]
        positions_T = np.asarray(positions_T)
        decodes = positions_T.max() >= PROMPT
        table, size = (
            (DECODE_S, self.placement.decode_batch)
            if decodes
            else (PREFILL_S, self.placement.prefill_batch)
        )
        if self.on:
            with self.overlapping[stage]:
                time.sleep(float(table[size][device, 0]) * (stop - start))
        return positions_T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "prefill", "decode"),
    [
        (((0, 0, 1), (1, 1, 4), (2, 4, 6)), 2, 4),  # two micro-batches for three stages
        (((1, 0, 4), (2, 4, 6)), 4, 2),  # four, from two that prefill
        (((2, 0, 2), (0, 2, 3), (1, 3, 6)), 2, 8),  # one: a round trip for every token
        (((0, 0, 3), (1, 3, 6)), 2, 2),  # a stage that is three times slower than the other
    ],
)
def test_throughput_follows_the_simulator(stages, prefill, decode):
    placement = Placement(
        stages, (16,) * CFG.layers, prefill, decode, 0.0, 0.0, 0.0, 0.0, 0.0, "heuristic"
    )
    simulated = simulate(problem(), placement)
    # Two sets of prompts that begin with other tokens, so that none finds pages of the first set.
    first, prompts = (
        [[k + start, *range(3, 2 + PROMPT)] for k in range(REQUESTS)] for start in (1, 30)
    )
    params = SamplingParams(max_tokens=NEW, temperature=0)
    slow = Slow(placement)
    options = {"dtype": "float32", "page_size": 4, "wrap": slow}
    with Runtime(sharp(CFG), CFG, placement, jax.devices(), **options) as runtime:
        runtime.generate(first, params)  # compiles
        slow.on = True
        began = time.monotonic()
        runtime.generate(prompts, params)
        seconds = time.monotonic() - began
    rate = REQUESTS * NEW / seconds
    print(
        f"{stages} {prefill} {decode}: {rate:.2f} tokens/s, simulated {simulated.tokens_per_s:.2f}"
    )
    assert rate == pytest.approx(simulated.tokens_per_s, rel=0.1)
