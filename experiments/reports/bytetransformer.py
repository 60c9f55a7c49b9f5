"""ByteTransformer (arXiv 2210.03052): the steps from padding to none, measured and counted.

Legend: B sequences, S padded length, T packed tokens, D model width, H heads, K head width.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reports.reporting import panels, save
from megajax.core.hardware import CARDS
from megajax.core.tree import Tree, named_leaves, nest
from megajax.layers import fused
from megajax.layers.attention import Context, attend
from megajax.layers.ops import Ops
from megajax.models import encoder
from megajax.models.encoder_config import EncoderConfig
from pallas_kernels import PackInfo, bench, bucket, pack, packed_attention, unpack
from pallas_kernels.attention import hopper_backward, hopper_forward
from pallas_kernels.attention.ranges import Rows, packed_rows, useful_pairs
from pallas_kernels.cases import paper_lengths
from pallas_kernels.dispatch import Implementation

# ---- pairs that attention visits
#
# How many pairs of rows attention's kernels visit, divided by the useful pairs, from their tables.
#
# A warpgroup computes each tile that has a live pair of its rows, and masks the other pairs of the
# tile. It passes the tiles that only the other warpgroup of its thread block needs: it waits while
# they are in use, because both share the tiles in memory. Both kinds are counted.


ROWS = hopper_forward.ROWS


@dataclasses.dataclass(frozen=True)
class Area:
    """Numbers of pairs in computed tiles and in passed tiles, divided by the useful pairs."""

    computed: float
    passed: float


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _read(
    rows: Rows,
    keys: int,
    width: int,
    forward: hopper_forward.Tile,
    backward: hopper_backward.Tile,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    tables = {
        "forward": hopper_forward.tables(rows, keys, forward)[0],
        "dq": hopper_backward.dq_tables(rows, keys, backward)[0],
        "dkv": hopper_backward.dkv_tables(rows, keys, backward, width)[0],
    }
    return useful_pairs(rows), tables


def areas(
    rows: Rows,
    keys: int,
    width: int,
    forward: hopper_forward.Tile,
    backward: hopper_backward.Tile,
) -> dict[str, Area]:
    """Returns the areas of one head by kernel: 'forward', 'dq' (none if fused) and 'dkv'."""
    blocks = {
        "forward": (ROWS // forward.heads, forward.block_k),
        "dq": (ROWS, backward.block_dq),
        "dkv": (backward.block_dkv, ROWS),
    }
    useful, tables = _read(rows, keys, width, forward, backward)
    areas_by_kernel = {}
    for name, table in jax.tree.map(np.asarray, tables).items():
        spans = table[:, 2:].reshape(table.shape[0], -1, 4)
        computed = (spans[..., 3] - spans[..., 0]).sum()
        passed = (table[:, 1] - table[:, 0]).sum() * spans.shape[1]
        pairs = float(np.prod(blocks[name])) / float(useful)
        areas_by_kernel[name] = Area(float(computed) * pairs, float(passed) * pairs)
    if backward.fused:
        del areas_by_kernel["dq"]
    return areas_by_kernel


def of_lengths(
    lengths: Sequence[int], width: int, group: int = 1, capacity: int | None = None
) -> dict[str, Area]:
    """Returns `areas` of packed self-attention, with the default tiles for its longest segment.

    capacity: number of packed tokens T; None: the sum of the lengths.
    """
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    capacity, longest = capacity or int(sum(lengths)), max(lengths)
    forward = hopper_forward.heuristic(width, group, longest)
    backward = hopper_backward.heuristic(width, longest)
    rows = jax.jit(packed_rows, static_argnums=(2, 3, 4))(cu, cu, capacity, False, None)
    return areas(rows, capacity, width, forward, backward)


# ---- the steps
#
# An encoder with padding and, step by step, without: what runs, and what it costs.
#
# The steps of ByteTransformer's figure 13 (arXiv 2210.03052), each added to the one before:
# LayerNorm fused with the bias and residual before it, GELU fused with its GEMM (section 3.2), zero
# padding (attention alone unpacks), fused attention of every length. And cuDNN's attention on
# padded rows, which the paper did not have. All run one set of weights through the blocks of
# models/encoder.py; as in the paper's benchmark, embedding and head are left out.
#
# `kernels` counts the same steps for kernels that are written one by one: XLA fuses the element-
# wise work of its own accord, so the first two steps gain less against it than against PyTorch.
#
# Legend: B sequences, S padded length, T packed tokens, D model width, H heads, K head width.


Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """A way to run the encoder.

    attention: 'xla' stores the logits, and unpacks packed tokens first. implementation: that of the
    kernels; None: their default on this device, which is plain JAX where a tuning table measured it
    to be faster.
    """

    name: str
    norm: bool = False
    gelu: bool = False
    packed: bool = False
    attention: Literal["xla", "cudnn", "varlen"] = "xla"
    implementation: Implementation | None = None


PADDED = Step("padded, XLA")
STEPS = (  # in the order of figure 13
    PADDED,
    Step("+ LayerNorm fusion", norm=True),
    Step("+ GELU fusion", norm=True, gelu=True),
    Step("+ zero padding", norm=True, gelu=True, packed=True),
    Step("+ fused attention", norm=True, gelu=True, packed=True, attention="varlen"),
)
OURS = STEPS[-1]
CUDNN = Step("padded, cuDNN", attention="cudnn")


def capacity_of(lengths: Sequence[int], longest: int) -> int:
    """Returns the tokens of a packed batch: a bucket, at most as many as with padding."""
    return bucket(sum(lengths), most=len(lengths) * longest)


def ops_of(step: Step, batch: int, longest: int) -> Ops:
    """Returns the operations that a step replaces. batch, longest: sizes of the padded rows."""
    kernel: Callable[..., Array] = functools.partial(attend, implementation=step.attention)
    if step.attention == "cudnn":
        kernel = _cudnn_rows
    elif step.attention == "varlen":
        kernel = functools.partial(_varlen, longest, step.implementation)
    elif step.packed and step.attention == "xla":
        kernel = functools.partial(_unpacked, batch, longest)
    changes: dict[str, Any] = {"attend": kernel}
    if step.norm:
        changes["settle"] = functools.partial(fused.settle, implementation=step.implementation)
    if step.gelu:
        changes["expand"] = functools.partial(fused.expand, implementation=step.implementation)
    return Ops(**changes)


def stack(
    cfg: EncoderConfig, step: Step, dtype: str, batch: int, longest: int, capacity: int
) -> Callable[[Sequence[Tree], Array, Array], Array]:
    """Returns (weights of each layer, x_BSD, lengths_B) -> out_BSD, all blocks of the encoder.

    A packed step does not read the padding of x, and its output is 0 there. It packs once where the
    tokens enter and unpacks once where they leave, as in section 3.2.
    """
    block = jax.jit(encoder.parts(cfg, ops=ops_of(step, batch, longest), dtype=dtype).block)

    def run(layers: Sequence[Tree], x_BSD: Array, lengths_B: Array) -> Array:
        def blocks(x: Array, context: Context) -> Array:
            for weights in layers:
                x, _, _ = block(weights, x, context)
            return x

        if not step.packed:
            return blocks(x_BSD, _padded_context(lengths_B, longest))
        x_TD, info = pack(x_BSD, lengths_B, capacity)
        return unpack(blocks(x_TD[None], _packed_context(info))[0], info)

    return run


def attention(
    step: Step, batch: int, longest: int, capacity: int
) -> Callable[[Array, Array, Array, Array], Array]:
    """Returns (q, k, v, lengths_B) -> out, a step's attention alone.

    q, k, v: (B, S, H, K), or (1, T, H, K) for a packed step.
    """
    kernel = ops_of(step, batch, longest).attend

    def run(q: Array, k: Array, v: Array, lengths_B: Array) -> Array:
        if not step.packed:
            return kernel(q, k, v, _padded_context(lengths_B, longest))
        return kernel(q, k, v, _packed_context(_info(lengths_B, capacity, longest)))

    return run


def weights(cfg: EncoderConfig, dtype: str, seed: int = 0) -> list[Tree]:
    """Returns each layer's random weights in `dtype`; biases and shifts count too."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        drawn = random.standard_normal(shape, np.float32)
        return 0.02 * drawn + np.float32(name.endswith("scale"))

    abstract = encoder.parts(cfg).abstract["blocks"]
    blocks = nest({name: draw(name, x.shape) for name, x in named_leaves(abstract)})
    return [jax.tree.map(lambda x: jnp.asarray(x[i], dtype), blocks) for i in range(cfg.layers)]  # noqa: B023


def _info(lengths_B: Array, capacity: int, longest: int) -> PackInfo:
    ends_B = jnp.cumsum(lengths_B, dtype=jnp.int32)
    return PackInfo(jnp.concatenate([jnp.zeros(1, jnp.int32), ends_B]), capacity, longest)


def _packed_context(info: PackInfo) -> Context:
    return Context(info.positions[None], info.segment_ids[None], causal=False)


def _padded_context(lengths_B: Array, longest: int) -> Context:
    positions_BS = jnp.broadcast_to(
        jnp.arange(longest, dtype=jnp.int32), (lengths_B.shape[0], longest)
    )
    segments_BS = jnp.where(positions_BS < lengths_B[:, None], jnp.int32(0), jnp.int32(-1))
    return Context(positions_BS, segments_BS, causal=False)


def _unpacked(batch: int, longest: int, q: Array, k: Array, v: Array, query: Context, *_) -> Array:
    """Attends on padded rows between packed products, as the paper did before its fused kernel."""
    assert query.segments_BS is not None
    ids_T = query.segments_BS[0]
    lengths_B = (ids_T[:, None] == jnp.arange(batch)[None]).sum(0, dtype=jnp.int32)
    info = _info(lengths_B, ids_T.shape[0], longest)
    q, k, v = (unpack(x[0], info) for x in (q, k, v))
    out_BSHK = attend(q, k, v, _padded_context(lengths_B, longest))
    return pack(out_BSHK, lengths_B, info.capacity)[0][None]


def _varlen(
    longest: int, choice: Implementation | None, q: Array, k: Array, v: Array, query: Context, *_
) -> Array:
    """Attends on packed tokens. longest: an upper bound on the length of a sequence."""
    assert query.segments_BS is not None
    out = packed_attention(
        q, k, v, segment_ids=query.segments_BS, max_seqlen=longest, implementation=choice
    )
    assert not isinstance(out, tuple)
    return out


def _cudnn_rows(q: Array, k: Array, v: Array, query: Context, *_) -> Array:
    """Attends by cuDNN's kernel with the rows' lengths, which is faster than with a mask."""
    assert query.segments_BS is not None
    lengths_B = (query.segments_BS >= 0).sum(1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        query_seq_lengths=lengths_B,
        key_value_seq_lengths=lengths_B,
        implementation="cudnn",
    )


# ---- what it costs


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a layer. bytes: size of the 16-bit operands and results, each counted once."""

    name: str
    flops: float
    bytes: float

    @property
    def floor_s(self) -> float:
        """Seconds that no kernel can be faster than on an H200."""
        return CARDS["H200"].floor_s(self.flops, self.bytes)


def visited_pairs(lengths: Sequence[int], width: int) -> int:
    """Returns the pairs of rows of one head that fused attention computes: all of each tile."""
    capacity = max(1 << (sum(lengths) - 1).bit_length(), 16384)  # one compile for most
    useful = sum(n * n for n in lengths)
    return round(of_lengths(lengths, width, capacity=capacity)["forward"].computed * useful)


def kernels(cfg: EncoderConfig, step: Step, lengths: Sequence[int], longest: int) -> list[Kernel]:
    """Returns the kernels of ONE layer of a step, written one by one."""
    D, F, H = cfg.width, cfg.mlp, cfg.heads
    rows = len(lengths) * longest
    T = capacity_of(lengths, longest) if step.packed else rows

    def product(name: str, inner: int, outer: int) -> Kernel:
        moved = T * (inner + outer) + inner * outer
        return Kernel(name, 2.0 * T * inner * outer, 2.0 * moved)

    def pass_over(name: str, columns: int, tokens: int = T) -> Kernel:
        return Kernel(name, 0.0, 2.0 * tokens * columns)

    def settle(name: str) -> list[Kernel]:
        if step.norm:  # y, residual -> x
            return [pass_over(f"{name} norm", 3 * D)]
        return [pass_over(f"{name} bias, residual", 3 * D), pass_over(f"{name} norm", 2 * D)]

    pairs = visited_pairs(lengths, cfg.head_width) if step.attention == "varlen" else rows * longest
    tokens = T if step.attention == "varlen" else rows
    moved = 4.0 * tokens * D
    if step.attention == "xla":  # the logits are written and read, and so are the weights
        moved += 4.0 * H * rows * longest
    attention = [Kernel("attention", 4.0 * pairs * D, 2 * moved)]
    if step.packed and step.attention == "xla":
        attention.insert(0, Kernel("unpack q, k, v", 0.0, 2.0 * 3 * D * (T + rows)))
        attention.append(Kernel("pack", 0.0, 2.0 * D * (T + rows)))
    return [
        product("query, key, value", D, 3 * D),
        *attention,
        product("attention out", D, D),
        *settle("attention"),
        product("up", D, F),
        *([] if step.gelu else [pass_over("bias, GELU", 2 * F)]),
        product("down", F, D),
        *settle("feed-forward"),
    ]


def useful_flops(cfg: EncoderConfig, lengths: Sequence[int]) -> float:
    """Returns the FLOPs of all layers' products and attention, without padding."""
    D, F, T = cfg.width, cfg.mlp, sum(lengths)
    pairs = sum(n * n for n in lengths)
    return cfg.layers * (2.0 * T * (4 * D * D + 2 * D * F) + 4.0 * pairs * D)


def missing(step: Step) -> str | None:
    """Returns why a step cannot run here, None if it can."""
    if step.attention == "cudnn" and jax.default_backend() != "gpu":
        return "cuDNN needs a GPU"
    return None


# ---- rows of results
#
# What the steps claim, as rows of a result file: exactness, counted work, times, figures.
#
# Rows name their part: 'exact' (any device), 'count' and 'step' (arithmetic: no device), 'time' and
# 'attention' (a GPU). Device times are the sums of a call's kernels; wall times hold the gaps too.
#
# Legend: B sequences, S padded length, T packed tokens, D model width, H heads, K head width.


Row = dict[str, Any]
EXACT = 1e-5  # float32, per valid token (chosen: rounding of two orders of summation)
# Percent that figure 13 says each step adds to a layer (quoted from memory, not checked).
PAPER_GAINS = {
    "+ LayerNorm fusion": 3.2,
    "+ GELU fusion": 3.8,
    "+ zero padding": 24.7,
    "+ fused attention": 20.0,
}


def runnable(implementation: Implementation | None = None) -> list[Step]:
    """Returns the steps that this machine can run. implementation: that of our kernels."""
    steps = [step for step in (*STEPS, CUDNN) if missing(step) is None]
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
    steps: Sequence[Step],
) -> Iterator[Row]:
    """Yields each step's largest difference from the padded model in float32, over valid tokens.

    Packed steps read NaN where x pads. Bound: 1e-5 in float32; in 16 bits twice the padded model's
    own error plus 1e-3. steps: must include the padded one.
    Raises: AssertionError when a packed step gives something else than 0 in the padding.
    """
    x_BSD = np.random.default_rng(0).normal(size=(batch, longest, cfg.width)).astype(np.float32)

    def runner(step: Step, dtype: str) -> Callable[[np.ndarray], np.ndarray]:
        capacity = capacity_of([longest] * batch, longest)  # one program for all averages
        forward = jax.jit(stack(cfg, step, dtype, batch, longest, capacity))
        layers = weights(cfg, dtype)

        def run(lengths_B: np.ndarray) -> np.ndarray:
            live_BS = np.arange(longest) < lengths_B[:, None]
            clean_BSD = np.where(live_BS[..., None], x_BSD, np.nan if step.packed else 0.0)
            with jax.default_matmul_precision("highest"):
                out_BSD = forward(layers, jnp.asarray(clean_BSD, dtype), jnp.asarray(lengths_B))
            found_BSD = np.asarray(out_BSD, np.float64)
            if step.packed and not (found_BSD[~live_BS] == 0).all():
                raise AssertionError(f"{step.name} gave something else than 0 in the padding")
            return found_BSD[live_BS]

        return run

    runs = {step: runner(step, dtype) for step in steps}
    oracle = runs[PADDED] if dtype == "float32" else runner(PADDED, "float32")
    for alpha in alphas:
        lengths_B = np.asarray(paper_lengths(longest, batch, alpha=alpha), np.int32)
        want = oracle(lengths_B)
        bound = EXACT
        if dtype != "float32":
            bound = 2 * float(np.abs(runs[PADDED](lengths_B) - want).max()) + 1e-3
        for step, run in runs.items():
            error = float(np.abs(run(lengths_B) - want).max())
            yield {
                "part": "exact",
                "step": step.name,
                "dtype": dtype,
                "alpha": alpha,
                "batch": batch,
                "longest": longest,
                "tokens": int(lengths_B.sum()),
                "error": error,
                "bound": bound,
                "passed": error <= bound,
            }


def counted(cfg: EncoderConfig, batch: int, longest: int) -> Row:
    """Returns a row: the work with padding divided by the work without, all layers, on the paper's
    draw."""
    lengths = paper_lengths(longest, batch)
    padded, ours = (kernels(cfg, step, lengths, longest) for step in (PADDED, OURS))
    useful = sum(n * n for n in lengths)
    total = cfg.layers / 1e9
    return {
        "part": "count",
        "batch": batch,
        "longest": longest,
        "tokens": sum(lengths),
        "capacity": capacity_of(lengths, longest),
        "padded_tokens": batch * longest,
        "tokens_saving": batch * longest / capacity_of(lengths, longest),
        "attention_saving_useful": batch * longest**2 / useful,
        "attention_saving_visited": batch * longest**2 / visited_pairs(lengths, cfg.head_width),
        "gflop_padded": total * sum(k.flops for k in padded),
        "gflop_ours": total * sum(k.flops for k in ours),
        "gbyte_padded": total * sum(k.bytes for k in padded),
        "gbyte_ours": total * sum(k.bytes for k in ours),
    }


def steps_counted(cfg: EncoderConfig, batch: int, longest: int) -> Iterator[Row]:
    """Yields each step's work and its floor on an H200: an estimate that no kernel reaches."""
    lengths, before = paper_lengths(longest, batch), 0.0
    for step in STEPS:
        work = kernels(cfg, step, lengths, longest)
        floor = cfg.layers * sum(k.floor_s for k in work)
        yield {
            "part": "step",
            "step": step.name,
            "batch": batch,
            "longest": longest,
            "gflop": cfg.layers * sum(k.flops for k in work) / 1e9,
            "gbyte": cfg.layers * sum(k.bytes for k in work) / 1e9,
            "floor_ms_estimate": 1e3 * floor,
            "gain_percent_estimate": 100 * (before / floor - 1) if before else None,
            "gain_percent_paper": PAPER_GAINS.get(step.name),
        }
        before = floor


# ---- times


def timed(
    cfg: EncoderConfig,
    step: Step,
    dtype: str,
    batch: int,
    longest: int,
    clock: bench.Clock = bench.device_clock,
    runs: int = 50,
) -> Row:
    """Returns the times of the whole stack on the paper's draw, and its useful FLOP/s."""
    lengths = paper_lengths(longest, batch)
    capacity = capacity_of(lengths, longest)
    layers, lengths_B = weights(cfg, dtype), jnp.asarray(lengths, jnp.int32)
    inputs = [
        (layers, jax.random.normal(key, (batch, longest, cfg.width), dtype), lengths_B)
        for key in jax.random.split(jax.random.key(0), 3)
    ]
    run = jax.jit(stack(cfg, step, dtype, batch, longest, capacity))
    row: Row = {
        "part": "time",
        "step": step.name,
        "batch": batch,
        "longest": longest,
        "dtype": dtype,
    }
    row |= _times(run, inputs, clock, runs)
    return row | {"useful_tflops": useful_flops(cfg, lengths) / row["median_ms"] / 1e9}


def timed_attention(
    cfg: EncoderConfig,
    step: Step,
    dtype: str,
    batch: int,
    longest: int,
    clock: bench.Clock = bench.device_clock,
    runs: int = 50,
) -> Row:
    """Returns the times of one attention of a step, from projected q, k, v."""
    lengths = paper_lengths(longest, batch)
    capacity = capacity_of(lengths, longest)
    rows = (1, capacity) if step.packed else (batch, longest)
    shape = (*rows, cfg.heads, cfg.head_width)
    inputs = [
        (
            *(jax.random.normal(k, shape, dtype) for k in jax.random.split(key, 3)),
            jnp.asarray(lengths, jnp.int32),
        )
        for key in jax.random.split(jax.random.key(0), 3)
    ]
    run = jax.jit(attention(step, batch, longest, capacity))
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
        "median_ms": 1e3 * timing.median_s,
        "p10_ms": 1e3 * timing.p10_s,
        "p90_ms": 1e3 * timing.p90_s,
        "n": timing.runs,
        "clock": timing.clock,
        "wall_ms": 1e3 * wall,
    }


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
        page = "docs/papers/bytetransformer.md"
        return f"{text}The table in {page} has the paper's milliseconds beside those above."
    return f"{text}The paper's 24.7 ms on an A100 need a GPU: nothing was timed here."


def draw_counts(rows: Sequence[Row], path: Path) -> None:
    """Draws the counted work, padded over ours, by maximum length; the paper's own saving is
    dashed."""
    counts = [r for r in rows if r["part"] == "count" and r["batch"] == 16]
    longest = [r["longest"] for r in counts]
    last = counts[-1]
    figure, axes = _axes("maximum length of a sequence (tokens)", "padded / ours (times)")
    for key, name, colour in (
        ("tokens_saving", "products, norms: tokens in the bucket", "C0"),
        ("attention_saving_visited", "attention: pairs that the kernel visits", "C1"),
        ("attention_saving_useful", "attention: useful pairs", "C2"),
    ):
        axes.plot(longest, [r[key] for r in counts], "o-", color=colour, label=name)
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
    """Draws the time of the forward pass by maximum length, batch 16; the paper's on an A100 is
    dashed.

    Raises: ValueError when no length has both times, ours and padded XLA's.
    """
    times = [r for r in rows if r["part"] == "time" and r["batch"] == 16]
    figure, axes = _axes("maximum length of a sequence (tokens)", "12 layers forward (ms)")
    medians = {
        name: {r["longest"]: r["median_ms"] for r in times if r["step"] == name}
        for name in (PADDED.name, CUDNN.name, OURS.name)
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
