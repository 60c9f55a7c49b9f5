"""Flux and COMET: SIMULATED times as rows of a result file, exactness, figures and tables.

Rows name their part: 'op' is a tensor-parallel product with its collective, 'layer' a mixture of
experts, both on the simulated GPU of overlap_simulator.py. Exact results and times of a GPU are
other parts, with layers of their own. Papers' figures are those of Flux's and COMET's abstracts and
of Flux's repository; where only a plot gives one, there is none here.

Legend: T tokens, A active experts a token, E experts, R ranks, m tokens of all ranks, D model
width, F width of a layer or expert.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from experiments.reports import overlap_simulator as sim
from experiments.reports.overlap_simulator import Load, Machine, most_comm_blocks
from experiments.reports.reporting import (
    Columns,
    Row,
    markdown_table,
    panels,
    read,
    rows_of,
    rows_table,
    save,
    source,
    table,
)
from megajax.core.errors import UserError, did_you_mean, nearest_multiples
from megajax.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from megajax.parallel.expert_matmul import (
    Routing,
    dispatch_grouped_matmul,
    grouped_matmul_combine,
)
from megajax.parallel.overlap import Implementation
from pallas_kernels.collective.cases import DENSE, RANKS, Dense, Product
from pallas_kernels.expert.cases import MIXTURES, Mixture

COMM_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
# Overlap efficiency in percent: the abstract's best; and on 8 L20 over PCIe at m 4096, by Flux's
# equation 2 from the ms of its repository (docs/performance.md): one after the other, the fastest
# product, fused.
FLUX_BEST = 96.0
FLUX_L20 = {"gather": (16.946, 5.316, 5.903), "scatter": (17.664, 5.389, 5.730)}
# 8192 tokens of what Flux's repository times on 8 GPUs (docs/performance.md).
REPOSITORY = {
    "32 experts": Mixture(8192, 8192, 32, 4, 1),
    "8 experts": Mixture(8192, 8192, 8, 2, 1),
}
# The same document's ms of both products of a mixture, fused, on 8 H100 (elsewhere it says H800):
# (experts, tensor, expert parallel) -> first, second.
FLUX_MIXTURES = {
    ("32 experts", 8, 1): (1.146, 1.863),
    ("32 experts", 4, 2): (1.335, 1.685),
    ("8 experts", 8, 1): (0.657, 1.019),
    ("8 experts", 4, 2): (0.955, 0.981),
}
COMET_LAYER, COMET_MODEL = 1.96, 1.71  # times faster, means over its baselines (abstract)


def names(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """'a,b' -> ['a', 'b'], all of them known. Raises: UserError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            near = did_you_mean(word, known)
            raise UserError(f"{flag}={word} must be of {', '.join(known)}.{near} (--{flag})")
    return words


def numbers(flag: str, text: str, kind: type[float] | type[int] = int) -> list[Any]:
    """'1,16' -> [1, 16], none below 0, and no int below 1. Raises: UserError."""
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all((1 if kind is int else 0) <= x < math.inf for x in values):
        rule = "whole numbers above 0" if kind is int else "numbers of at least 0"
        raise UserError(f"{flag}={text} must be {rule} with commas (--{flag}=1,16)")
    return values


def shared(flag: str, text: str) -> list[int]:
    """'64,128' -> [64, 128], numbers of rows that RANKS ranks share evenly. Raises: UserError."""
    counts = numbers(flag, text)
    for count in counts:
        if count % RANKS:
            raise UserError(
                f"{flag}={count} must be a multiple of the {RANKS} ranks; "
                f"{nearest_multiples(count, RANKS)} (--{flag})"
            )
    return counts


def dense_rows(models: Sequence[str], sizes: Sequence[int], machine: Machine) -> Iterator[Row]:
    """Yields a row for each model, size m and product; a scatter for 16- and 32-bit partial sums.

    A row has the seconds of the product alone, of the collective alone, of one after the other, of
    XLA's ring in lockstep, of one fused kernel with its best number of SMs that copy, and of the
    floor.
    """
    for model in models:
        case = DENSE[model]
        for m in sizes:
            for product in (case.up(m), case.down(m, 2), case.down(m, 4)):
                yield {"part": "op", "model": model} | _op(product, machine)


def _op(product: Product, machine: Machine) -> Row:
    times, how = sim.simulate(product, machine, sim.candidates(product, COMM_BLOCKS))
    ring = sim.ring_s(product, machine)
    shard_tiles = -(-product.shard // how.tile[0]) * -(-product.n // how.tile[1])
    ways = {"xla": times.serial_s, "ring": ring, "fused": times.fused_s}
    return {
        "kind": product.kind,
        "m": product.m,
        "n": product.n,
        "k": product.k,
        "wire_bytes": product.wire_bytes,
        "gemm_s": times.gemm_s,
        "comm_s": times.comm_s,
        "serial_s": times.serial_s,
        "ring_s": ring,
        "fused_s": times.fused_s,
        "floor_s": times.floor_s,
        "fused_efficiency": times.efficiency,
        "ring_efficiency": sim.efficiency(ring, times.gemm_s, times.serial_s),
        "comm_blocks": how.comm_blocks,
        "tile": "{}x{}".format(*how.tile),
        "chunk": how.chunk,
        "most_comm_blocks": most_comm_blocks(product.ranks * shard_tiles, machine.sms),
        "fastest": min(ways, key=lambda name: ways[name]),
    }


# ---- experts


def draw_routing(
    tokens: int, experts: int, active: int, std: float, seed: int = 0
) -> tuple[np.ndarray, float]:
    """Returns (experts_TA, the std that was reached); a token has `active` different experts.

    std: standard deviation of the experts' shares of all rows; 0: all are equally popular.
    Popularity is log-normal and scaled until the drawn shares have this std. A token cannot take
    one expert twice, so there is a largest std, which a larger one is replaced by.
    """
    rng = np.random.default_rng(seed)
    popularity_E = rng.normal(size=experts)
    noise_TE = rng.gumbel(size=(tokens, experts))

    def draw(scale: float) -> np.ndarray:
        scores_TE = noise_TE + scale * popularity_E
        return np.argpartition(scores_TE, -active, axis=1)[:, -active:]

    def spread(experts_TA: np.ndarray) -> float:
        return float((np.bincount(experts_TA.ravel(), minlength=experts) / experts_TA.size).std())

    low, high = 0.0, 8.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if spread(draw(middle)) < std else (low, middle)
    found_TA = draw(low)
    return found_TA, spread(found_TA)


def loads_of(experts_TA: np.ndarray, experts: int, expert_ranks: int) -> list[Load]:
    """Returns the load of each group of experts, seen by its first rank.

    Tokens lie on RANKS ranks in order; rank r has the experts of group r // (RANKS / expert_ranks).
    """
    tokens, local = len(experts_TA), experts // expert_ranks
    source_T = np.arange(tokens) * RANKS // tokens
    loads = []
    for group in range(expert_ranks):
        mine_TA = experts_TA // local == group
        counts_RE = np.zeros((RANKS, local), np.int32)
        source_TA = np.broadcast_to(source_T[:, None], mine_TA.shape)
        np.add.at(counts_RE, (source_TA[mine_TA], experts_TA[mine_TA] % local), 1)
        tokens_R = np.bincount(source_T[mine_TA.any(axis=1)], minlength=RANKS)
        loads.append(Load(group * RANKS // expert_ranks, counts_RE, tokens_R))
    return loads


def expert_rows(
    models: Sequence[str],
    layouts: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    stds: Sequence[float],
    machine: Machine,
) -> Iterator[Row]:
    """Yields a row for each model, layout (tensor, expert), number of tokens and imbalance.

    A row has the seconds of both products of a layer, one after the other and fused, for 16-bit
    partial sums as COMET's; the speedup of the layer; and the part of its communication that is
    hidden.
    """
    for model in models:
        case = MIXTURES[model]
        for count in tokens:
            for std in stds:
                drawn_TA, reached = draw_routing(count, case.experts, case.active, std)
                for tensor, expert in layouts:
                    loads = loads_of(drawn_TA, case.experts, expert)
                    row: Row = {
                        "part": "layer",
                        "model": model,
                        "tensor": tensor,
                        "expert": expert,
                        "tokens": count,
                        "std": std,
                        "std_reached": reached,
                    }
                    yield row | _layer(case, tensor, loads, machine)


def _layer(case: Mixture, tensor: int, loads: Sequence[Load], machine: Machine) -> Row:
    row: Row = {}
    total = dict.fromkeys(("gemm_s", "comm_s", "serial_s", "fused_s"), 0.0)
    for part in ("dispatch", "combine"):
        product = sim.product_of(case, part, tensor, sum_bytes=2)
        ways = sim.expert_candidates(product, COMM_BLOCKS)
        times, how = sim.expert_simulate(product, loads, machine, ways)
        row |= {f"{part}_{name}": value for name, value in dataclasses.asdict(times).items()}
        row |= {f"{part}_efficiency": times.efficiency, f"{part}_comm_blocks": how.comm_blocks}
        for name in total:
            total[name] += getattr(times, name)
    hidden = sim.efficiency(total["fused_s"], total["gemm_s"], total["serial_s"])
    return row | total | {"speedup": total["serial_s"] / total["fused_s"], "hidden": hidden}


def repository_rows(machine: Machine) -> Iterator[Row]:
    """Yields our simulated ms of the mixtures that Flux's repository times, beside its own."""
    for (name, tensor, expert), reported_ms in FLUX_MIXTURES.items():
        case = REPOSITORY[name]
        drawn_TA, _ = draw_routing(8192, case.experts, case.active, 0.0)
        row = _layer(case, tensor, loads_of(drawn_TA, case.experts, expert), machine)
        for part, ms in zip(("dispatch", "combine"), reported_ms, strict=True):
            yield {
                "part": "repository",
                "model": name,
                "tensor": tensor,
                "expert": expert,
                "product": part,
                "gemm_ms": 1e3 * row[f"{part}_gemm_s"],
                "fused_ms": 1e3 * row[f"{part}_fused_s"],
                "reported_ms": ms,
            }


# ---- figures


def draw_ops(rows: Sequence[Row], device: str, path: Path) -> str:
    """Draws the efficiency by m of GPT-3's products, fused and as a ring; returns the figure's
    title.

    Each product has a panel, with Flux's reported figures. Far below 0 the axis is logarithmic,
    because a small product loses many times the time of its collective.
    """
    from matplotlib.ticker import NullLocator

    figure, places = panels(2, size=(9.5, 4), sharey=True)
    products = [r for r in rows if r["part"] == "op" and r["model"] == "gpt3_175b"]
    shown = [r for r in products if r["wire_bytes"] == 2]
    titles = {"gather": "all-gather, then product", "scatter": "product, then reduce-scatter"}
    for axes, (kind, title) in zip(places, titles.items(), strict=True):
        curve = [r for r in shown if r["kind"] == kind]
        for implementation, style in (("fused", "o-C0"), ("ring", "^:C1")):
            at = [(r["m"], 100 * r[f"{implementation}_efficiency"]) for r in curve]
            axes.plot(*zip(*at, strict=True), style, label=f"{implementation}, simulated", zorder=3)
        serial, gemm, fused = FLUX_L20[kind]
        reported = 100 * (sim.efficiency(fused, gemm, serial) or 0.0)
        axes.plot(4096, reported, "xk", label="Flux on 8 x L20 (PCIe), as reported", zorder=4)
        axes.axhline(FLUX_BEST, color="0.4", linestyle="--", label="Flux's best, as reported")
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set(xlabel="rows of the layer's input, m")
        axes.set_xscale("log", base=2)
        axes.set_xticks([r["m"] for r in curve], [str(r["m"]) for r in curve], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yscale("symlog", linthresh=100, linscale=1.5)
        axes.yaxis.set_minor_locator(NullLocator())
        low = min(
            [
                100 * r[f"{implementation}_efficiency"]
                for r in shown
                for implementation in ("fused", "ring")
            ]
        )
        ticks = [y for y in (-3000, -1000, -300) if y > 1.5 * low]
        axes.set_yticks([*ticks, -100, -50, 0, 50, 100], [*map(str, ticks), -100, -50, 0, 50, 100])
        axes.set_ylim(min(1.5 * low, -20), 130)
    places[0].set_ylabel("overlap efficiency (%)\n(logarithmic below -100)")
    places[1].legend(fontsize=8, frameon=False, loc="lower right")
    large = [100 * r["fused_efficiency"] for r in shown if r["m"] >= 2048]
    title = f"Overlap of GPT-3's products (simulated {device})"
    if large:
        title = (
            f"A fused kernel hides {min(large):.0f} to {max(large):.0f} % of the communication at "
            f"m >= 2048 (GPT-3, simulated {device})"
        )
    save(figure, path, title)
    return title


def draw_layers(rows: Sequence[Row], device: str, path: Path) -> str:
    """Draws the speedup of a layer over its parts one after the other, by layout.

    It is the mean over the numbers of tokens, at the imbalance nearest to 0.032. The paper's
    figures are not drawn: COMET reports times over other systems, which hide a part of their
    communication.
    """
    figure, (axes,) = panels(size=(7, 4), sharey=True)
    measured = [r for r in rows if r["part"] == "layer"]
    std = min((r["std"] for r in measured), key=lambda s: abs(s - 0.032))
    models = list(dict.fromkeys(r["model"] for r in measured))
    layouts = list(dict.fromkeys((r["tensor"], r["expert"]) for r in measured))
    highest = 0.0
    for i, model in enumerate(models):
        means = [
            np.mean(
                [
                    r["speedup"]
                    for r in measured
                    if (r["model"], r["tensor"], r["expert"], r["std"]) == (model, *layout, std)
                ]
            )
            for layout in layouts
        ]
        place = np.arange(len(layouts)) + (i - (len(models) - 1) / 2) * 0.25
        bars = axes.bar(place, means, 0.22, color=f"C{i}", label=model)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
        highest = max(highest, *means)
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_xticks(range(len(layouts)), ["{} x {}".format(*layout) for layout in layouts])
    axes.set(xlabel="tensor x expert", ylabel="times as fast as one after the other")
    axes.set_ylim(0, 1.35 * highest)
    axes.legend(fontsize=8, frameon=False, ncols=len(models), loc="upper center")
    alike = [r for r in measured if r["std"] == std]
    speedup, hidden = (float(np.mean([r[name] for r in alike])) for name in ("speedup", "hidden"))
    title = (
        f"Fused: {speedup:.2f} times as fast as one after the other, {100 * hidden:.0f} % of "
        f"communication hidden\n(means of layers, imbalance {std}, simulated {device}; COMET's "
        f"{COMET_LAYER} is over other systems)"
    )
    save(figure, path, title)
    return title


def reported() -> Mapping[str, Any]:
    """Returns what the papers report, for the result file."""
    l20 = {kind: sim.efficiency(t[2], t[1], t[0]) for kind, t in FLUX_L20.items()}
    return {
        "flux_best_efficiency": FLUX_BEST / 100,
        "flux_l20_efficiency": l20,
        "comet_layer": COMET_LAYER,
        "comet_model": COMET_MODEL,
    }


# ---- tables of documents


def gather() -> str:
    """Returns GPT-3's gather on a simulated H100: microseconds and overlap efficiency, by m."""
    machine = sim.H100
    ways: dict[str, tuple[tuple[int, ...], bool]] = {
        "fused, 4 SMs copy": ((4,), True),
        "8 SMs": ((8,), True),
        "copy engine, no rotation": ((0,), False),
    }
    lines = []
    for m in (512, 1024, 2048, 4096, 8192, 16384):
        op = DENSE["gpt3_175b"].up(m)
        gemm, serial = sim.gemm_s(op.m, op.n, op.k, machine), sim.serial_s(op, machine)
        cells = [f"{1e6 * s:.0f}" for s in (gemm, sim.comm_s(op, machine), serial)]
        fused = [
            sim.best_fused(op, machine, sim.candidates(op, blocks, rotated))[0]
            for blocks, rotated in ways.values()
        ]
        for seconds in (sim.ring_s(op, machine), *fused):
            hidden = sim.efficiency(seconds, gemm, serial)
            cells.append(f"{1e6 * seconds:.0f} ({_percent(hidden)})")
        lines.append((m, *cells))
    heads = ("m", "product", "gather", "serial", "XLA's ring", *ways)
    return f"{markdown_table(heads, lines)}\n\n*simulated, 8 x H100*"


def _percent(share: float | None) -> str:
    """Returns a share in percent; '-' where there is none."""
    return "-" if share is None else f"{100 * share:.0f} %"


def ops(path: Path) -> str:
    """Returns GPT-3's products by m: serial, ring, fused, floor."""

    def us(name: str) -> Callable[[dict], str]:
        return lambda row: f"{1e6 * row[f'{name}_s']:.0f}"

    columns: Columns = {
        "product": lambda r: f"{r['kind']}, {8 * r['wire_bytes']} bits",
        "m": lambda r: str(r["m"]),
        "alone": us("gemm"),
        "collective": us("comm"),
        "serial": us("serial"),
        "ring": us("ring"),
        "fused": us("fused"),
        "floor": us("floor"),
        "efficiency": lambda r: _percent(r["fused_efficiency"]),
        "SMs that copy (c_max)": lambda r: f"{r['comm_blocks']} ({r['most_comm_blocks']})",
        "fastest": lambda r: r["fastest"],
    }
    return table(path, columns, part="op", model="gpt3_175b")


def models(dense: Path, mixtures: Path) -> str:
    """Returns estimates of whole models: dense ones by pass, mixtures as means over their
    layouts."""
    heads = (
        "model",
        "pass",
        "tokens",
        "one after the other",
        "hidden",
        "times, estimated",
        "times, as the paper reports",
    )
    results = read(dense), read(mixtures)
    groups: dict[tuple, list[dict]] = {}
    for row in (row for result in results for row in rows_of(result, part="model")):
        if row.get("std", 0.032) == 0.032:
            tokens = row["m"] if "m" in row else row["tokens"]
            groups.setdefault((row["model"], row["passes"], tokens), []).append(row)
    lines = []
    for key, rows in groups.items():
        serial, hidden, times = (
            sum(row[name] for row in rows) / len(rows)
            for name in ("serial_s", "fused_s", "speedup")
        )
        figures = f"{1e6 * serial:.0f}", f"{1e6 * hidden:.0f}", f"{times:.2f}"
        lines.append((*key, *figures, f"{rows[0]['reported']:.2f}"))
    origin = source(results[1]).strip("*")
    return f"{markdown_table(heads, lines)}\n\n*estimates: {origin}*"


def layers(path: Path) -> str:
    """Returns mixtures of experts by layout: serial, fused, and the hidden part."""
    columns: Columns = {
        "model": lambda r: r["model"],
        "tensor x expert": lambda r: f"{r['tensor']} x {r['expert']}",
        "products, us": lambda r: f"{1e6 * r['gemm_s']:.0f}",
        "serial": lambda r: f"{1e6 * r['serial_s']:.0f}",
        "fused": lambda r: f"{1e6 * r['fused_s']:.0f}",
        "times": lambda r: f"{r['speedup']:.2f}",
        "hidden": lambda r: _percent(r["hidden"]),
        "SMs that copy": lambda r: f"{r['dispatch_comm_blocks']}, {r['combine_comm_blocks']}",
    }
    return table(path, columns, part="layer", tokens=16384, std=0.032)


def repository(path: Path) -> str:
    """Returns the times that Flux's repository reports of its mixtures beside our simulation."""
    columns: Columns = {
        "layer": lambda r: f"{r['model']}, {r['tensor']} x {r['expert']}",
        "product": lambda r: r["product"],
        "alone, ms": lambda r: f"{r['gemm_ms']:.2f}",
        "fused, ms": lambda r: f"{r['fused_ms']:.2f}",
        "Flux, as reported, ms": lambda r: f"{r['reported_ms']:.2f}",
        "reported / ours": lambda r: f"{r['reported_ms'] / r['fused_ms']:.2f}",
    }
    result = read(path)
    rows = rows_of(result, part="repository")
    return f"{rows_table(rows, columns)}\n\n{source(result, device='8 x H100')}"


# ---- whole models
#
# What hidden communication is worth to whole models: ESTIMATES from simulated times of one block.
#
# Papers report whole systems over others: Flux 1.24 times in training and 1.66 in prefill, COMET
# 1.71 times. Here a model is equal blocks, and a block its products with their collectives, one
# after the other or fused (overlap.py), attention itself at a product's rate, and in training the
# weights' gradients. Nothing else costs time (norms, vocabulary, optimizer, other parallelism), and
# what is compared with hides nothing: a real run gains less.
#
# Legend: m tokens of all ranks.


SEQUENCE = 2048  # positions that attention sees half of (chosen: GPT-3's)
# Columns of queries, keys and values together (the models' configurations).
QKV = {
    "gpt3_175b": 3 * 12288,
    "llama_70b": 80 * 128,
    "mixtral_8x7b": 48 * 128,
    "qwen2_moe_2p7b": 48 * 128,
    "phi3p5_moe": 48 * 128,
}
# m (chosen: one sequence a microbatch; eight that come in together), and Flux's figure (abstract).
TOKENS = {"training": SEQUENCE, "prefill": 8 * SEQUENCE}
FLUX_MODEL = {"training": 1.24, "prefill": 1.66}
# Products of attention, forward and backward, over those of forward alone (FlashAttention: 2, 5).
BOTH_WAYS = 3.5


def dense_model_rows(models: Sequence[str], machine: Machine) -> Iterator[Row]:
    """Yields a row for each model in training and in prefill: seconds of a block."""
    for model in models:
        for passes, m in TOKENS.items():
            case = DENSE[model]
            forward = (*attention(model, case.width, m, RANKS), case.up(m), case.down(m, 2))
            products, other_s = forward, attention_s(case.width, m, RANKS, machine)
            if passes == "training":
                products += tuple(map(backward, forward))
                other_s *= BOTH_WAYS
                other_s += sum(sim.gemm_s(p.k, p.n, p.m, machine) for p in forward)
            times = [sim.simulate(p, machine, sim.candidates(p, COMM_BLOCKS))[0] for p in products]
            yield {"part": "model", "model": model, "passes": passes, "m": m} | speedup(
                other_s + sum(t.serial_s for t in times),
                # Where a fused kernel loses, none is taken.
                other_s + sum(min(t.serial_s, t.fused_s) for t in times),
                FLUX_MODEL[passes],
            )


def mixture_row(layer: Mapping[str, Any], machine: Machine) -> Row:
    """Returns the row of a block's forward pass, from that of its experts' layer.

    Attention hides no communication. The expert axis shards attention's tokens, tensor its heads.
    """
    model, tensor = layer["model"], layer["tensor"]
    width, m = MIXTURES[model].width, layer["tokens"] // layer["expert"]
    other_s = attention_s(width, m, tensor, machine)
    for product in attention(model, width, m, tensor):
        other_s += sim.gemm_s(product.m, product.n, product.k, machine)
        other_s += sim.comm_s(product, machine) if tensor > 1 else 0.0
    row = {"part": "model", "passes": "forward"}
    row |= {name: layer[name] for name in ("model", "tensor", "expert", "tokens", "std")}
    return row | speedup(other_s + layer["serial_s"], other_s + layer["fused_s"], COMET_MODEL)


def speedup(serial_s: float, fused_s: float, reported: float) -> Row:
    """Returns both times of a block, their ratio, and what the paper reports of its systems."""
    return {
        "serial_s": serial_s,
        "fused_s": fused_s,
        "speedup": serial_s / fused_s,
        "reported": reported,
    }


def attention(model: str, width: int, m: int, ranks: int) -> tuple[Product, Product]:
    """Returns the products into attention and out of it."""
    return (
        Product("gather", m, QKV[model] // ranks, width, ranks),
        Product("scatter", m, width, width // ranks, ranks, 2),
    )


def attention_s(width: int, m: int, ranks: int, machine: Machine) -> float:
    """Returns seconds of scores and their sums, half of them masked."""
    return 2 * m * SEQUENCE * width / ranks / machine.flops


def backward(product: Product) -> Product:
    """Returns the product that gives the gradient of x: a gather for a scatter, and a scatter for a
    gather."""
    kind = "scatter" if product.kind == "gather" else "gather"
    return Product(kind, product.m, product.k, product.n, product.ranks, 2)


# ---- exactness: Flux
#
# What flux.py claims to be exact: a feed-forward layer and all gradients against NumPy.
#
# The models' layers on 8 devices, widths divided by 64, float32, with biases and the residual:
# plain collectives and rings, one way and both, against whole products in float64; and that a
# second run gives the same bits. Times of emulated devices would say nothing, so there are none.
#
# Legend: m rows of all ranks, D model width, F width of the layer.


FLUX_NARROWER = 64
ROWS = (RANKS, 25 * RANKS)  # one row a rank; a number that no tile divides
FLUX_WAYS = {"xla": ("xla", False), "ring": ("ring", False), "ring, both ways": ("ring", True)}
FLUX_RESULTS = ("y", "dx", "dups", "dup_biases", "ddown", "ddown_bias")


def flux_rows(models: Sequence[str]) -> Iterator[Row]:
    """Yields a row for each model, number of rows and way: the largest errors.

    An error is the largest difference over the largest value of NumPy's.
    """
    for model in models:
        case = DENSE[model]
        gated = case.inputs == 2
        for m in ROWS:
            arrays = draw_dense(case, m)
            want = exact(arrays, gated)
            for label, (implementation, both_ways) in FLUX_WAYS.items():
                run = dense_layer(implementation, both_ways, gated)
                first, again = (jax.tree.map(np.asarray, run(*arrays)) for _ in range(2))
                yield (
                    {
                        "part": "exact",
                        "model": model,
                        "way": label,
                        "m": m,
                        "width": case.width // FLUX_NARROWER,
                        "hidden": case.hidden // FLUX_NARROWER,
                    }
                    | {
                        f"{name}_error": float(np.abs(got - value).max() / np.abs(value).max())
                        for name, got, value in zip(FLUX_RESULTS, first, want, strict=True)
                    }
                    | {"same_bits": all(map(np.array_equal, first, again))}
                )


def draw_dense(case: Dense, m: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Returns (x_mD, ups_IDF, up_biases_IF, down_FD, down_bias_D, dy_mD), float32; I inputs."""
    random = np.random.default_rng(seed)
    D, F, inputs = case.width // FLUX_NARROWER, case.hidden // FLUX_NARROWER, case.inputs

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    ups, up_biases = normal(inputs, D, F, scale=D**-0.5), normal(inputs, F)
    return normal(m, D), ups, up_biases, normal(F, D, scale=F**-0.5), normal(D), normal(m, D)


def dense_layer(implementation: Any, both_ways: bool, gated: bool) -> Callable[..., tuple]:
    """Returns f(*arrays) -> RESULTS, on RANKS devices."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("tensor",))
    how = {"axis": "tensor", "implementation": implementation, "both_ways": both_ways}
    cut = P("tensor"), P(None, None, "tensor"), P(None, "tensor"), P("tensor"), P()

    def local(x: Any, ups: Any, up_biases: Any, down: Any, down_bias: Any) -> Any:
        h = all_gather_matmul(
            x, list(ups), bias=list(up_biases), activation="swiglu" if gated else "gelu_tanh", **how
        )
        return matmul_reduce_scatter(h if gated else h[0], down, bias=down_bias, residual=x, **how)

    layer: Any = jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=P("tensor"))

    @jax.jit
    def both(*arrays: jax.Array) -> tuple:
        y, pull = jax.vjp(layer, *arrays[:-1])
        return y, *pull(arrays[-1])

    return both


def exact(arrays: tuple[np.ndarray, ...], gated: bool) -> tuple[np.ndarray, ...]:
    """Returns RESULTS in float64."""
    x, ups, up_biases, down, down_bias, dy = (a.astype(np.float64) for a in arrays)
    zs = x @ ups + up_biases[:, None]
    dh = dy @ down.T
    if gated:
        gate, up = zs
        s = 1 / (1 + np.exp(-gate))
        h, dzs = gate * s * up, np.stack([dh * up * s * (1 + gate * (1 - s)), dh * gate * s])
    else:
        c, cube = (2 / np.pi) ** 0.5, 0.044715
        (z,) = zs
        t = np.tanh(c * (z + cube * z**3))
        h = z * (1 + t) / 2
        dzs = dh * ((1 + t) / 2 + z * (1 - t * t) * c * (1 + 3 * cube * z * z) / 2)[None]
    dx = dy + (dzs @ ups.transpose(0, 2, 1)).sum(0)
    return h @ down + down_bias + x, dx, x.T @ dzs, dzs.sum(1), h.T @ dy, dy.sum(0)


# ---- exactness: COMET
#
# What comet.py claims to be exact: both products of a layer and all gradients against a loop.
#
# The models' experts, top-k and layouts on 8 devices, widths divided by 16, float32, against
# float64 NumPy that goes through the tokens and their choices one by one; and that a second run
# gives the same bits. Times of emulated devices would say nothing, so there are none.
#
# Legend: T tokens, A active experts a token, D model width, F width of an expert, E experts.


COMET_NARROWER = 16
COMET_WAYS: tuple[Implementation, ...] = ("xla", "ring")
COMET_RESULTS = ("y", "dx", "dgate", "dup", "ddown", "dweights")


def comet_rows(
    models: Sequence[str], layouts: Sequence[tuple[int, int]], tokens: int, stds: Sequence[float]
) -> Iterator[Row]:
    """Yields a row for each model, imbalance, layout (tensor, expert) and way: the largest errors.

    tokens: number of tokens of all ranks, a multiple of RANKS. An error is the largest difference
    divided by the largest value of the loop.
    """
    for model in models:
        case = MIXTURES[model]
        for std in stds:
            arrays, index_TA, reached = draw_mixture(case, tokens, std)
            want = loop(arrays, index_TA)
            for (tensor, expert), implementation in itertools.product(layouts, COMET_WAYS):
                run = mixture_layer(tensor, expert, implementation)
                first, again = (jax.tree.map(np.asarray, run(arrays, index_TA)) for _ in range(2))
                errors = {
                    f"{name}_error": float(np.abs(got - value).max() / np.abs(value).max())
                    for name, got, value in zip(COMET_RESULTS, first, want, strict=True)
                }
                yield (
                    {
                        "part": "exact",
                        "model": model,
                        "tensor": tensor,
                        "expert": expert,
                        "way": implementation,
                        "tokens": tokens,
                        "experts": case.experts,
                        "active": case.active,
                        "width": case.width // COMET_NARROWER,
                        "hidden": case.hidden // COMET_NARROWER,
                        "std_reached": reached,
                    }
                    | errors
                    | {
                        "same_bits": all(map(np.array_equal, first, again)),
                    }
                )


def draw_mixture(
    case: Mixture, tokens: int, std: float, seed: int = 0
) -> tuple[tuple[np.ndarray, ...], np.ndarray, float]:
    """Returns ((x_TD, gate_EDF, up_EDF, down_EFD, weight_TA, dy_TD) float32, index_TA, the std)."""
    index_TA, reached = draw_routing(tokens, case.experts, case.active, std, seed)
    random = np.random.default_rng(seed)
    D, F, E = case.width // COMET_NARROWER, case.hidden // COMET_NARROWER, case.experts

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    weight_TA = random.dirichlet(np.ones(case.active), tokens).astype(np.float32)
    x_TD, dy_TD = normal(tokens, D), normal(tokens, D)
    inputs = normal(E, D, F, scale=D**-0.5), normal(E, D, F, scale=D**-0.5)
    down_EFD = normal(E, F, D, scale=F**-0.5)
    return (x_TD, *inputs, down_EFD, weight_TA, dy_TD), index_TA.astype(np.int32), reached


def mixture_layer(
    tensor: int, expert: int, implementation: Implementation
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns f(arrays, index_TA) -> RESULTS of the two halves on tensor x expert devices."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]).reshape(expert, tensor), ("expert", "tensor"))
    ranks, cut, back = P(("expert", "tensor")), P("expert", None, "tensor"), P("expert", "tensor")

    def local(x: Any, gate: Any, up: Any, down: Any, weight: Any, index: Any) -> Any:
        h, dispatch = dispatch_grouped_matmul(
            x,
            [gate, up],
            Routing(index, weight),
            expert_axis="expert",
            tensor_axis="tensor",
            activation="swiglu",
            implementation=implementation,
        )
        return grouped_matmul_combine(
            h, down, dispatch, weights=weight, implementation=implementation
        )

    layer: Any = jax.shard_map(
        local, mesh=mesh, in_specs=(ranks, cut, cut, back, ranks, ranks), out_specs=ranks
    )

    @jax.jit
    def both(arrays: tuple[jax.Array, ...], index: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda *a: layer(*a, index), *arrays[:-1])
        return y, *pull(arrays[-1])

    return both


def loop(arrays: tuple[np.ndarray, ...], index_TA: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns RESULTS in float64, one choice of one token after the other."""
    x, gate, up, down, weight, dy = (a.astype(np.float64) for a in arrays)
    y, dx, dgate, dup, ddown, dweight = (np.zeros_like(a) for a in (x, x, gate, up, down, weight))
    for t, chosen in enumerate(index_TA):
        for a, e in enumerate(chosen):
            g, u = x[t] @ gate[e], x[t] @ up[e]
            s = 1 / (1 + np.exp(-g))
            answer = (g * s * u) @ down[e]
            y[t] += weight[t, a] * answer
            dweight[t, a] = dy[t] @ answer
            ddown[e] += np.outer(g * s * u, weight[t, a] * dy[t])
            dh = down[e] @ (weight[t, a] * dy[t])
            dg, du = dh * u * s * (1 + g * (1 - s)), dh * g * s
            dgate[e] += np.outer(x[t], dg)
            dup[e] += np.outer(x[t], du)
            dx[t] += gate[e] @ dg + up[e] @ du
    return y, dx, dgate, dup, ddown, dweight
