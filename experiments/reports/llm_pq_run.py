"""Serves a small trained model by a plan for a preset's cluster, scaled down to that model.

Every device keeps its speeds, and its memory shrinks (`shrunk`) so that the small model's weights
are as tight a fit as the preset's. The loss of quality by layer and width is estimated from
text that the model learnt (`quality.expected_loss`), not assumed; the held-out loss is measured
before and after. The stages run on emulated devices of this machine, whose speed says nothing about
the cluster.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.hardware import MixedCluster
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel import sharding
from megajax.quant import Format, quantize_model
from megajax.serving import SamplingParams
from megajax.systems import llm_pq
from megajax.systems.llm_pq.planning import (
    CONTEXT_BYTES,
    USABLE,
    Workload,
    problem_of,
    uniform_bits,
)
from megajax.systems.llm_pq.problem import Placement
from megajax.systems.llm_pq.quality import expected_loss, loss_of, windows
from megajax.systems.llm_pq.runtime import Runtime
from megajax.systems.llm_pq.solver import Solver
from megajax.systems.open_model import OpenModel

ROWS, LENGTH = 16, 129  # (chosen) of calibration text, and of held-out text
PROMPT, ANSWER = 32, 32  # (chosen) tokens
SHOWN = 2  # answers that are printed


def served(
    opened: OpenModel,
    workload: Workload,
    cluster: MixedCluster,
    solver: Solver,
    time_limit_s: float,
) -> dict[str, Any]:
    """Plans at equal quality, quantizes, measures and serves; prints and returns what it finds.

    Raises: UserError where the scaled cluster cannot hold the model.
    """
    mesh = MeshSpec().build(jax.devices()[:1])
    params, what = opened.load(sharding.layout(mesh, "none", decode=True, model=opened.cfg))
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)  # on no mesh
    cfg = opened.cfg
    learnt, judged = (
        windows("stdlib", opened.tokenizer, (ROWS, LENGTH), held_out=held) for held in (False, True)
    )
    omega = expected_loss(params, cfg, learnt, [format_of(b) for b in workload.bits])
    small = dataclasses.replace(
        workload,
        name=opened.name,
        stack=cfg.stack,
        vocab=cfg.padded_vocab,
        positions=0,
        prompt=PROMPT,
        new_tokens=ANSWER,
        omega=omega,
    )
    scaled = shrunk(cluster, workload, small)
    placement = llm_pq.plan(small, scaled, solver=solver, time_limit_s=time_limit_s)
    problem = problem_of(small, scaled)
    print(f"{what}: {cfg.layers} layers on {cluster.name}, memory scaled down with the model")
    for device, start, stop in placement.stages:
        widths = ", ".join(str(b) for b in placement.bits[start:stop])
        print(
            f"  {cluster.cards[device].name} {device}: layers {start} to {stop - 1}, bits {widths}"
        )
    before = loss_of(params, cfg, judged)
    after = {"plan": loss_of(in_bits(params, cfg, placement.bits), cfg, judged)}
    if (even := uniform_bits(problem)) is not None:
        after[f"even split, {even} bits"] = loss_of(
            in_bits(params, cfg, [even] * cfg.layers), cfg, judged
        )
    print(f"held-out loss: dense {before:.4f} nats a token")
    for name, loss in after.items():
        print(f"  {name}: {loss:.4f} ({loss - before:+.4f})")
    answers, seconds = _answers(params, cfg, placement, judged, small.requests, cluster.devices)
    for answer in answers[:SHOWN]:
        print(f"  answer: {opened.tokenizer.decode(answer)!r}")
    tokens = sum(len(answer) for answer in answers)
    print(f"{len(answers)} answers of {ANSWER} tokens, {tokens / seconds:.0f} tokens/s (emulated)")
    return {
        "model": what,
        "stages": [list(s) for s in placement.stages],
        "bits": list(placement.bits),
        "prefill_batch": placement.prefill_batch,
        "decode_batch": placement.decode_batch,
        "loss_dense": before,
        "loss": after,
        "emulated_tokens_per_s": tokens / seconds,
    }


def format_of(bits: int) -> Format | None:
    """Returns the format that the runtime uses for a width; None: it stays dense."""
    return None if bits >= 16 else Format(bits, 128, 0, scale_dtype="float16")


def in_bits(params: Tree, cfg: DecoderConfig, bits: Any) -> Tree:
    """Returns the parameters with each layer in its width."""
    return quantize_model(params, cfg, [format_of(b) for b in bits])


def shrunk(cluster: MixedCluster, large: Workload, small: Workload) -> MixedCluster:
    """Returns the cluster whose memory is as tight for the small model's weights.

    Of the small model each device has room for its share of the layers, by its memory and rounded
    up, with their caches, for embedding and head, and for the width a layer that the large model's
    weights have room for in the mean. Few layers cannot be cut as finely as many.
    """
    theirs, ours = problem_of(large, cluster), problem_of(small, cluster)
    taken = theirs.layers * theirs.cache_bytes + theirs.first_bytes + theirs.last_bytes
    room = (theirs.memory.sum() - taken) / theirs.layers
    tightness = min(max(room, theirs.layer_bytes.min()) / theirs.layer_bytes.max(), 1.0)
    layer = ours.cache_bytes + tightness * ours.layer_bytes.max()
    shares = np.ceil(ours.layers * theirs.memory / theirs.memory.sum())
    memory = shares * layer + ours.first_bytes + ours.last_bytes
    cards = tuple(
        dataclasses.replace(card, memory_bytes=int((m + CONTEXT_BYTES) / USABLE) + 1)
        for card, m in zip(cluster.cards, memory, strict=True)
    )
    return dataclasses.replace(cluster, cards=cards)


def beginnings(rows: np.ndarray, count: int) -> list[list[int]]:
    """Returns prompts: those of one row have unlike lengths, from PROMPT down to 1."""
    lengths = [max(PROMPT - i // len(rows), 1) for i in range(count)]
    return [rows[i % len(rows), :length].tolist() for i, length in enumerate(lengths)]


def _answers(
    params: Tree,
    cfg: DecoderConfig,
    placement: Placement,
    judged: np.ndarray,
    count: int,
    devices: int,
) -> tuple[list[list[int]], float]:
    """Returns the answers to beginnings of held-out text, and the seconds that they took."""
    prompts = beginnings(judged, count)
    asked = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    local = jax.devices()
    with Runtime(
        params, cfg, placement, [local[i % len(local)] for i in range(devices)], dtype="float32"
    ) as runtime:
        began = time.monotonic()
        return runtime.generate(prompts, asked), time.monotonic() - began
