"""The serving part of gpu_check.py: decode attention and a 1.2B decoder's tokens beside rooflines.

Attention: one step's paged attention in bf16, batch 64 with 4,096 keys each, as bytes of pages a
second over the best rate of memory in the same process. Decoding: an engine with random weights and
greedy requests that all run at once; the time of a token of all of them, wall clock, beside the
time in which the card's memory bandwidth moves weights and pages (megajax/cost/serving.py); and the
same with the blocks' matrices in 4 bits, in groups of 128, beside the tokens a second in bf16.
First token: from `submit` of one prompt to its first output, the engine idle. Profiles: the
launches of a token, and the time for which the GPU computes.
"""

import dataclasses
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.hardware import Cluster, find_card
from megajax.cost import serving as cost
from megajax.models import decoder
from megajax.models.decoder_config import PRESETS, DecoderConfig
from megajax.quant import Format, quantize_model
from megajax.serving import Engine, SamplingParams
from pallas_kernels import bench, paged_attention
from scripts.gpu_session.channel import Item

GOALS = {"attention": 0.85, "decode": 0.6}  # of the copy's bandwidth, of the memory roofline
PAGE = 16
# (batch, keys, query heads, key-value heads, head width) of Llama 3 8B's attention.
ATTENTION, TINY_ATTENTION = (64, 4096, 32, 8, 128), (2, 64, 4, 2, 32)
BATCHES = (1, 64)
PROMPT, ANSWER, STEPS, TRACED = 512, 256, 40, 3


def items(rehearsal: bool) -> list[Item]:
    """Returns all items, the most valuable first."""
    engine = functools.cache(functools.partial(_engine, rehearsal))
    batches = (1, 2) if rehearsal else BATCHES
    wide: dict[int, float] = {}  # tokens a second in bf16, by batch

    def timed(batch: int, bits: int | None) -> dict[str, Any]:
        figures = decode(functools.partial(engine, bits), batch, rehearsal)
        if bits is None:
            wide[batch] = figures["tokens_per_s"]
            return figures
        # The roofline is that of bf16 weights.
        comparison = {"over_bf16": figures["tokens_per_s"] / wide[batch]} if batch in wide else {}
        return figures | {"of_roofline": None, "roofline_s": None, "goal": None} | comparison

    return [
        Item("decode attention", functools.partial(attention, rehearsal), limit_s=120),
        *(
            Item(
                f"decode batch {batch}{'' if bits is None else f' int{bits}'}",
                functools.partial(timed, batch, bits),
                about={"batch": batch},
                limit_s=240,
            )
            for bits in (None, 4)
            for batch in batches
        ),
        Item(
            "first token",
            functools.partial(first_token, functools.partial(engine, None), rehearsal),
            limit_s=120,
        ),
        *(
            Item(
                f"profile batch {batch}{'' if bits is None else f' int{bits}'}",
                functools.partial(profile, functools.partial(engine, bits), batch, rehearsal),
                limit_s=120,
            )
            for bits in (None, 4)
            for batch in batches
        ),
    ]


def attention(rehearsal: bool) -> dict[str, Any]:
    """Times paged attention of a decode step beside a copy of memory."""
    B, M, H, G, K = TINY_ATTENTION if rehearsal else ATTENTION
    pages = B * M // PAGE
    clock = bench.wall_clock if rehearsal else bench.device_clock
    table = np.random.default_rng(0).permutation(pages).reshape(B, M // PAGE).astype(np.int32)
    one = jnp.arange(B, dtype=jnp.int32), jnp.ones(B, jnp.int32), jnp.full(B, M, jnp.int32)
    shapes = (
        jax.ShapeDtypeStruct((B, H, K), jnp.bfloat16),
        *[jax.ShapeDtypeStruct((pages, PAGE, G, K), jnp.bfloat16)] * 2,
    )
    inputs = [bench.normal(key, shapes) for key in jax.random.split(jax.random.key(0), 2)]

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return paged_attention(q, k, v, jnp.asarray(table), *one)

    timing = bench.measure(run, inputs, 2 if rehearsal else 20, 1 if rehearsal else 5, clock)
    copy = bench.peaks(64 if rehearsal else 8192, clock)["copy_bytes_per_s"]
    rate = sum(x.nbytes for x in inputs[0][1:]) / timing.median_s
    return {
        "median_s": timing.median_s,
        "p10_s": timing.p10_s,
        "p90_s": timing.p90_s,
        "clock": timing.clock,
        "bytes_per_s": rate,
        "copy_bytes_per_s": copy,
        "of_copy": rate / copy,
        "goal": GOALS["attention"],
    }


def _engine(rehearsal: bool, bits: int | None = None) -> tuple[DecoderConfig, Engine]:
    """bits: of the blocks' matrices; None: they are dense."""
    cfg = DecoderConfig(layers=2) if rehearsal else PRESETS["llama3_1b"]()
    dtype = "float32" if rehearsal else "bfloat16"

    def weights(key: jax.Array) -> Any:
        params = decoder.parts(cfg).init(key)
        return jax.tree.map(lambda x: x.astype(dtype), params)

    def quantized(key: jax.Array) -> Any:
        """The blocks are copies of one: rounding takes seconds a block, on the host."""
        one = dataclasses.replace(cfg, layers=1)
        fmt = Format(bits or 4, 32 if rehearsal else 128, 0)
        params = quantize_model(decoder.parts(one).init(key), one, fmt)
        params["blocks"] = jax.tree.map(
            lambda x: jnp.repeat(x, cfg.layers, axis=0), params["blocks"]
        )
        params["tokens"] = params["tokens"].astype(dtype)
        return params

    make = quantized if bits else jax.jit(weights)
    context = 64 if rehearsal else PROMPT + ANSWER
    # Pages for all sequences, without what prompts could share.
    engine = Engine(
        cfg,
        make(jax.random.key(0)),
        dtype=dtype,
        context=context,
        max_batch=2 if rehearsal else max(BATCHES),
        prefix_cache=False,
    )
    return cfg, engine


def _prompts(cfg: DecoderConfig, batch: int, length: int) -> list[list[int]]:
    random = np.random.default_rng(batch)
    return random.integers(0, cfg.vocab, (batch, length)).tolist()


def decode(
    made: Callable[[], tuple[DecoderConfig, Engine]], batch: int, rehearsal: bool
) -> dict[str, Any]:
    """Measures tokens a second of so many sequences, once all prompts have been computed."""
    cfg, engine = made()
    advance, end = _begun(cfg, engine, batch, rehearsal)
    steps = 4 if rehearsal else STEPS
    times, counts = [], []
    for _ in range(steps):
        began = time.perf_counter()
        counts.append(advance())
        times.append(time.perf_counter() - began)
    end()
    tokens = sum(counts)
    each = sum(times) / tokens * batch
    return {
        "token_s": each,
        "tokens_per_s": tokens / sum(times),
        "dispatch_s": np.median(times).item(),
        "clock": "wall",
        "n": steps,
        **_roofline(cfg, batch, PROMPT + ANSWER // 2, each),
    }


def profile(
    made: Callable[[], tuple[DecoderConfig, Engine]], batch: int, rehearsal: bool
) -> dict[str, Any]:
    """What the GPU does for a token of all sequences, by jax.profiler, which turns graphs off."""
    cfg, engine = made()
    advance, end = _begun(cfg, engine, batch, rehearsal)
    advance()
    jax.block_until_ready(engine.programs.state)  # what the trace begins with has ended
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                advance()
            jax.block_until_ready(engine.programs.state)
        events = sorted(_launched(folder))
    end()
    tokens, busy, until, by_name = TRACED * engine.programs.steps, 0.0, 0.0, Counter()
    for start, seconds, name in events:
        busy += max(0.0, start + seconds - max(start, until))
        until = max(until, start + seconds)
        by_name[name] += seconds
    return {
        "batch": batch,
        "launches": len(events) / tokens,
        "busy_s": busy / tokens,
        "n": tokens,
        "span_s": (until - events[0][0]) / tokens if events else None,
        "clock": "profiler",
        "kernels": {name: seconds / tokens for name, seconds in by_name.most_common(12)},
    }


def _launched(folder: str) -> list[tuple[float, float, str]]:
    """(start, seconds, name) of what a GPU's streams ran; none on a CPU."""
    path = next(Path(folder).rglob("*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    return [
        (1e-9 * event.start_ns, 1e-9 * event.duration_ns, event.name)
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def _begun(
    cfg: DecoderConfig, engine: Engine, batch: int, rehearsal: bool
) -> tuple[Callable[[], int], Callable[[], None]]:
    """Starts greedy requests. Returns (a step, which gives the number of new tokens; their end)."""
    prompt, answer = (16, 24) if rehearsal else (PROMPT, ANSWER)
    asked = SamplingParams(max_tokens=answer, temperature=0)
    begun: dict[int, int] = {engine.submit(p, asked): 0 for p in _prompts(cfg, batch, prompt)}

    def advance() -> int:
        new = 0
        for output in engine.step():
            begun[output.request_id] += len(output.tokens)
            new += len(output.tokens)
        return new

    def end() -> None:
        for id in begun:
            engine.cancel(id)
        list(engine.run())

    while min(begun.values()) < 2 * engine.programs.steps:  # prompts, and the loop is compiled
        advance()
    return advance, end


def _roofline(cfg: DecoderConfig, batch: int, context: int, measured_s: float) -> dict[str, Any]:
    """The memory roofline of a decode step, where the card is known."""
    card = find_card(jax.devices()[0].device_kind)
    if card is None:
        return {"roofline_s": None, "of_roofline": None}

    def load_of(rows: int, tokens: int, phase: Any) -> Any:
        return cfg.workload(rows, tokens, "bfloat16", phase)

    bound = cost.decode_bound(load_of, Cluster(card, 1, 1), batch, context)
    return {"roofline_s": bound, "of_roofline": bound / measured_s, "goal": GOALS["decode"]}


def first_token(
    made: Callable[[], tuple[DecoderConfig, Engine]], rehearsal: bool
) -> dict[str, Any]:
    """Seconds from submitting a prompt to its first token, the engine idle."""
    cfg, engine = made()
    runs, length = (2, 16) if rehearsal else (10, PROMPT)
    times = []
    for prompt in _prompts(cfg, runs + 1, length):
        began = time.perf_counter()
        engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0))
        while not engine.step():
            pass
        times.append(time.perf_counter() - began)
        list(engine.run())
    p10, median, p90 = (float(x) for x in np.percentile(times[1:], (10, 50, 90)))
    about = {"prompt": length, "n": runs, "clock": "wall"}
    return {"median_s": median, "p10_s": p10, "p90_s": p90} | about
