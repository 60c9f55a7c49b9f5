"""What padding_free.py claims, as rows of a result file: exactness, counted work, times, figures.

Rows name their part: 'exact' (any device), 'count' and 'step' (arithmetic: no device), 'time' and
'attention' (a GPU). Device times are the sums of a call's kernels; wall times hold the gaps too.

Legend: B sequences, S padded length, T packed tokens, D model width, H heads, K head width.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reports import padding_free as free
from experiments.reports.figure import panels, save
from megajax.models.encoder_config import EncoderConfig
from pallas_kernels import bench
from pallas_kernels.attention.cases import paper_lengths
from pallas_kernels.dispatch import Implementation

Row = dict[str, Any]
Array = jax.Array
EXACT = 1e-5  # float32, per valid token (chosen: rounding of two orders of summation)
# Percent that figure 13 says each step adds to a layer (quoted from memory, not checked).
PAPER_GAINS = {
    "+ LayerNorm fusion": 3.2, "+ GELU fusion": 3.8, "+ zero padding": 24.7,
    "+ fused attention": 20.0,
}  # fmt: skip


def runnable(implementation: Implementation | None = None) -> list[free.Step]:
    """The steps that this machine can run, those with kernels by this implementation of them."""
    steps = [step for step in (*free.STEPS, free.CUDNN) if free.missing(step) is None]
    return [
        dataclasses.replace(step, implementation=implementation) if step.norm else step
        for step in steps
    ]


def exact(
    cfg: EncoderConfig,
    dtype: str,
    batch: int,
    longest: int,
    alphas: Sequence[float],
    steps: Sequence[free.Step],
) -> Iterator[Row]:
    """Yields each step's largest difference from the padded model in float32, over valid tokens.

    Packed steps read NaN where x pads. Bound: 1e-5 in float32; in 16 bits twice the padded model's
    own error plus 1e-3. steps: with the padded one.
    Raises: AssertionError when a packed step gives something else than 0 in the padding.
    """
    x_BSD = np.random.default_rng(0).normal(size=(batch, longest, cfg.width)).astype(np.float32)

    def runner(step: free.Step, dtype: str) -> Callable[[np.ndarray], np.ndarray]:
        capacity = free.capacity_of([longest] * batch, longest)  # one program for all averages
        stack = jax.jit(free.stack(cfg, step, dtype, batch, longest, capacity))
        layers = free.weights(cfg, dtype)

        def run(lengths_B: np.ndarray) -> np.ndarray:
            live_BS = np.arange(longest) < lengths_B[:, None]
            clean_BSD = np.where(live_BS[..., None], x_BSD, np.nan if step.packed else 0.0)
            with jax.default_matmul_precision("highest"):
                out_BSD = stack(layers, jnp.asarray(clean_BSD, dtype), jnp.asarray(lengths_B))
            found_BSD = np.asarray(out_BSD, np.float64)
            if step.packed and not (found_BSD[~live_BS] == 0).all():
                raise AssertionError(f"{step.name} gave something else than 0 in the padding")
            return found_BSD[live_BS]

        return run

    runs = {step: runner(step, dtype) for step in steps}
    wanted = runs[free.PADDED] if dtype == "float32" else runner(free.PADDED, "float32")
    for alpha in alphas:
        lengths_B = np.asarray(paper_lengths(longest, batch, alpha=alpha), np.int32)
        want = wanted(lengths_B)
        bound = EXACT
        if dtype != "float32":
            bound = 2 * float(np.abs(runs[free.PADDED](lengths_B) - want).max()) + 1e-3
        for step, run in runs.items():
            error = float(np.abs(run(lengths_B) - want).max())
            yield {
                "part": "exact", "step": step.name, "dtype": dtype, "alpha": alpha,
                "batch": batch, "longest": longest, "tokens": int(lengths_B.sum()),
                "error": error, "bound": bound, "passed": error <= bound,
            }  # fmt: skip


def counted(cfg: EncoderConfig, batch: int, longest: int) -> Row:
    """Work with padding over work without, all layers, on the paper's draw."""
    lengths = paper_lengths(longest, batch)
    padded, ours = (free.kernels(cfg, step, lengths, longest) for step in (free.PADDED, free.OURS))
    useful = sum(n * n for n in lengths)
    total = cfg.layers / 1e9
    return {
        "part": "count", "batch": batch, "longest": longest, "tokens": sum(lengths),
        "capacity": free.capacity_of(lengths, longest), "padded_tokens": batch * longest,
        "tokens_saving": batch * longest / free.capacity_of(lengths, longest),
        "attention_saving_useful": batch * longest**2 / useful,
        "attention_saving_visited": batch * longest**2
        / free.visited_pairs(lengths, cfg.head_width),
        "gflop_padded": total * sum(k.flops for k in padded),
        "gflop_ours": total * sum(k.flops for k in ours),
        "gbyte_padded": total * sum(k.bytes for k in padded),
        "gbyte_ours": total * sum(k.bytes for k in ours),
    }  # fmt: skip


def steps_counted(cfg: EncoderConfig, batch: int, longest: int) -> Iterator[Row]:
    """Yields each step's work and its floor on an H200: an estimate that no kernel reaches."""
    lengths, before = paper_lengths(longest, batch), 0.0
    for step in free.STEPS:
        kernels = free.kernels(cfg, step, lengths, longest)
        floor = cfg.layers * sum(k.floor_s for k in kernels)
        yield {
            "part": "step", "step": step.name, "batch": batch, "longest": longest,
            "gflop": cfg.layers * sum(k.flops for k in kernels) / 1e9,
            "gbyte": cfg.layers * sum(k.bytes for k in kernels) / 1e9,
            "floor_ms_estimate": 1e3 * floor,
            "gain_percent_estimate": 100 * (before / floor - 1) if before else None,
            "gain_percent_paper": PAPER_GAINS.get(step.name),
        }  # fmt: skip
        before = floor


# ---- times


def timed(
    cfg: EncoderConfig, step: free.Step, dtype: str, batch: int, longest: int,
    clock: bench.Clock = bench.device_clock, runs: int = 50,
) -> Row:  # fmt: skip
    """Returns the times of the whole stack on the paper's draw, and its useful FLOP/s."""
    lengths = paper_lengths(longest, batch)
    capacity = free.capacity_of(lengths, longest)
    layers, lengths_B = free.weights(cfg, dtype), jnp.asarray(lengths, jnp.int32)
    inputs = [
        (layers, jax.random.normal(key, (batch, longest, cfg.width), dtype), lengths_B)
        for key in jax.random.split(jax.random.key(0), 3)
    ]
    run = jax.jit(free.stack(cfg, step, dtype, batch, longest, capacity))
    row: Row = {
        "part": "time",
        "step": step.name,
        "batch": batch,
        "longest": longest,
        "dtype": dtype,
    }
    row |= _times(run, inputs, clock, runs)
    return row | {"useful_tflops": free.useful_flops(cfg, lengths) / row["median_ms"] / 1e9}


def timed_attention(
    cfg: EncoderConfig, step: free.Step, dtype: str, batch: int, longest: int,
    clock: bench.Clock = bench.device_clock, runs: int = 50,
) -> Row:  # fmt: skip
    """Returns the times of one attention of a step, from projected q, k, v."""
    lengths = paper_lengths(longest, batch)
    capacity = free.capacity_of(lengths, longest)
    rows = (1, capacity) if step.packed else (batch, longest)
    shape = (*rows, cfg.heads, cfg.head_width)
    inputs = [
        (*(jax.random.normal(k, shape, dtype) for k in jax.random.split(key, 3)),
         jnp.asarray(lengths, jnp.int32))
        for key in jax.random.split(jax.random.key(0), 3)
    ]  # fmt: skip
    run = jax.jit(free.attention(step, batch, longest, capacity))
    row: Row = {"part": "attention", "step": step.name, "batch": batch, "longest": longest}
    row |= {"dtype": dtype} | _times(run, inputs, clock, runs)
    flops = 4 * cfg.width * sum(n * n for n in lengths)
    return row | {"useful_tflops": flops / row["median_ms"] / 1e9}


def _times(run: Callable, inputs: Sequence[tuple], clock: bench.Clock, runs: int) -> Row:
    timing = bench.measure(run, inputs, runs, min(10, runs), clock)
    jax.block_until_ready(run(*inputs[0]))  # compiled by itself
    began = time.perf_counter()
    jax.block_until_ready([run(*inputs[i % len(inputs)]) for i in range(runs)][-1])
    wall = (time.perf_counter() - began) / runs
    return {
        "median_ms": 1e3 * timing.median_s, "p10_ms": 1e3 * timing.p10_s,
        "p90_ms": 1e3 * timing.p90_s, "n": timing.runs, "clock": timing.clock,
        "wall_ms": 1e3 * wall,
    }  # fmt: skip


# ---- figures


def conclusion(rows: Sequence[Row], on_gpu: bool) -> str:
    """Returns what a run has shown, beside the paper's number."""
    exact = [r for r in rows if r["part"] == "exact"]
    right = sum(r["passed"] for r in exact)
    last = [r for r in rows if r["part"] == "count" and r["batch"] == 16][-1]
    less = last["gflop_padded"] / last["gflop_ours"]
    text = f"Packed and padded BERT agree in {right} of {len(exact)} checks; without padding it "
    text += f"computes {less:.2f} times less at length {last['longest']} (counted). "
    if on_gpu:
        return f"{text}The table in PAPERS.md has the paper's milliseconds beside those above."
    return f"{text}The paper's 24.7 ms on an A100 need a GPU: nothing was timed here."


def draw_counts(rows: Sequence[Row], path: Path) -> None:
    """Counted work, padded over ours, by maximum length; the paper's own saving dashed."""
    kept = [r for r in rows if r["part"] == "count" and r["batch"] == 16]
    longest = [r["longest"] for r in kept]
    last = kept[-1]
    figure, axes = _axes("maximum length of a sequence (tokens)", "padded / ours (times)")
    for key, name, colour in (
        ("tokens_saving", "products, norms: tokens in the bucket", "C0"),
        ("attention_saving_visited", "attention: pairs that the kernel visits", "C1"),
        ("attention_saving_useful", "attention: useful pairs", "C2"),
    ):
        axes.plot(longest, [r[key] for r in kept], "o-", color=colour, label=name)
    # Lengths uniform in [0.2 S, S] have the mean 0.6 S and the mean square 0.413 S^2.
    for value, what, colour in ((1 / 0.6, "tokens", "C0"), (1 / 0.4133, "useful pairs", "C2")):
        label = f"paper: {what}, mean of its draw"
        axes.axhline(value, color=colour, linestyle="--", linewidth=1, label=label)
    axes.set_ylim(0, 1.1 / 0.4133)
    less = last["gflop_padded"] / last["gflop_ours"]
    axes.set_title(
        f"Without padding BERT computes {less:.2f} times less at length {last['longest']} (counted)"
    )
    _save(figure, axes, path)


def draw_times(rows: Sequence[Row], paper_ms: Mapping[int, float], path: Path) -> None:
    """Time of the forward pass by maximum length, batch 16; the paper's on an A100 dashed.

    Raises: ValueError when no length has both times, ours and padded XLA's.
    """
    found = [r for r in rows if r["part"] == "time" and r["batch"] == 16]
    figure, axes = _axes("maximum length of a sequence (tokens)", "12 layers forward (ms)")
    medians = {
        name: {r["longest"]: r["median_ms"] for r in found if r["step"] == name}
        for name in (free.PADDED.name, free.CUDNN.name, free.OURS.name)
    }
    labels = ("padded, XLA", "padded, cuDNN", "ours, packed")
    for i, (label, by_length) in enumerate(zip(labels, medians.values(), strict=True)):
        axes.plot(list(by_length), list(by_length.values()), "o-", color=f"C{i}", label=label)
    axes.plot(list(paper_ms), list(paper_ms.values()), "--", color="0.4", label="paper: on an A100")
    xla, _, ours = medians.values()
    last = max(xla.keys() & ours.keys())
    axes.set_title(
        f"Packed BERT is {xla[last] / ours[last]:.2f} times as fast as padded XLA at length {last}"
    )
    _save(figure, axes, path)


def _axes(x: str, y: str) -> tuple[Any, Any]:
    figure, (axes,) = panels(size=(7, 4))
    axes.set(xlabel=x, ylabel=y)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.set_title(axes.get_title(), fontsize=10)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    save(figure, path)
