"""What flux.py and comet.py claim, as rows of a result file: SIMULATED times, and their figures.

Rows name their part: 'op' is a tensor-parallel product with its collective, 'layer' a mixture of
experts, both on the simulated GPU of overlap_simulator.py. What is exact on any device and
what a GPU takes are other parts, with layers of their own. Papers' figures are those of Flux's and
COMET's abstracts and of Flux's repository; where only a plot gives one, there is none here.

Legend: T tokens, A active experts a token, E experts, R ranks.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reports import overlap_experts as experts
from experiments.reports import overlap_simulator as sim
from experiments.reports.figure import panels, save
from experiments.reports.overlap_experts import Load
from experiments.reports.overlap_schedules import most_comm_blocks
from experiments.reports.overlap_simulator import Machine
from megajax.core.errors import UserError, did_you_mean, nearest_multiples
from pallas_kernels.collective.cases import DENSE, RANKS, Product
from pallas_kernels.expert.cases import MIXTURES, Mixture

Row = dict[str, Any]
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
    ("32 experts", 8, 1): (1.146, 1.863), ("32 experts", 4, 2): (1.335, 1.685),
    ("8 experts", 8, 1): (0.657, 1.019), ("8 experts", 4, 2): (0.955, 0.981),
}  # fmt: skip
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
        found = [kind(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all((1 if kind is int else 0) <= x < math.inf for x in found):
        rule = "whole numbers above 0" if kind is int else "numbers of at least 0"
        raise UserError(f"{flag}={text} must be {rule} with commas (--{flag}=1,16)")
    return found


def shared(flag: str, text: str) -> list[int]:
    """'64,128' -> [64, 128], numbers of rows that RANKS ranks share evenly. Raises: UserError."""
    found = numbers(flag, text)
    for count in found:
        if count % RANKS:
            raise UserError(
                f"{flag}={count} must be a multiple of the {RANKS} ranks; "
                f"{nearest_multiples(count, RANKS)} (--{flag})"
            )
    return found


def dense_rows(models: Sequence[str], sizes: Sequence[int], machine: Machine) -> Iterator[Row]:
    """Yields a row for each model, size m and product; a scatter for 16- and 32-bit partial sums.

    Seconds of: the product alone, the collective alone, one after the other, XLA's ring in
    lockstep, one fused kernel with its best number of SMs that copy; the floor.
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
        "kind": product.kind, "m": product.m, "n": product.n, "k": product.k,
        "wire_bytes": product.wire_bytes, "gemm_s": times.gemm_s, "comm_s": times.comm_s,
        "serial_s": times.serial_s, "ring_s": ring, "fused_s": times.fused_s,
        "floor_s": times.floor_s, "fused_efficiency": times.efficiency,
        "ring_efficiency": sim.efficiency(ring, times.gemm_s, times.serial_s),
        "comm_blocks": how.comm_blocks, "tile": "{}x{}".format(*how.tile), "chunk": how.chunk,
        "most_comm_blocks": most_comm_blocks(product.ranks * shard_tiles, machine.sms),
        "fastest": min(ways, key=lambda way: ways[way]),
    }  # fmt: skip


# ---- experts


def draw_routing(
    tokens: int, experts: int, active: int, std: float, seed: int = 0
) -> tuple[np.ndarray, float]:
    """Returns (experts_TA, the std reached): different experts for each token.

    std: of the experts' shares of all rows; 0: all equally popular. Popularity is log-normal,
    scaled until the drawn shares have this std; a token cannot take one expert twice, so there is a
    largest std, and what was reached is returned.
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
    """Returns what each group of experts gets, seen by its first rank.

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

    Seconds of both products of a layer, one after the other and fused, for 16-bit partial sums as
    COMET's; the speedup of the layer and the part of its communication that is hidden.
    """
    for model in models:
        case = MIXTURES[model]
        for count in tokens:
            for std in stds:
                drawn_TA, reached = draw_routing(count, case.experts, case.active, std)
                for tensor, expert in layouts:
                    loads = loads_of(drawn_TA, case.experts, expert)
                    row: Row = {"part": "layer", "model": model, "tensor": tensor,
                                "expert": expert, "tokens": count, "std": std,
                                "std_reached": reached}  # fmt: skip
                    yield row | _layer(case, tensor, loads, machine)


def _layer(case: Mixture, tensor: int, loads: Sequence[Load], machine: Machine) -> Row:
    row: Row = {}
    total = dict.fromkeys(("gemm_s", "comm_s", "serial_s", "fused_s"), 0.0)
    for part in ("dispatch", "combine"):
        product = experts.product_of(case, part, tensor, sum_bytes=2)
        ways = experts.candidates(product, COMM_BLOCKS)
        times, how = experts.simulate(product, loads, machine, ways)
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
                "part": "repository", "model": name, "tensor": tensor, "expert": expert,
                "product": part, "gemm_ms": 1e3 * row[f"{part}_gemm_s"],
                "fused_ms": 1e3 * row[f"{part}_fused_s"], "reported_ms": ms,
            }  # fmt: skip


# ---- figures


def draw_ops(rows: Sequence[Row], device: str, path: Path) -> str:
    """Efficiency by m of GPT-3's products, fused and as a ring; returns the figure's title.

    A panel for each product, with Flux's reported figures. Far below 0 the axis is logarithmic: a
    small product loses many times the time of its collective.
    """
    from matplotlib.ticker import NullLocator

    figure, places = panels(2, size=(9.5, 4), sharey=True)
    found = [r for r in rows if r["part"] == "op" and r["model"] == "gpt3_175b"]
    shown = [r for r in found if r["wire_bytes"] == 2]
    titles = {"gather": "all-gather, then product", "scatter": "product, then reduce-scatter"}
    for axes, (kind, title) in zip(places, titles.items(), strict=True):
        mine = [r for r in shown if r["kind"] == kind]
        for way, style in (("fused", "o-C0"), ("ring", "^:C1")):
            at = [(r["m"], 100 * r[f"{way}_efficiency"]) for r in mine]
            axes.plot(*zip(*at, strict=True), style, label=f"{way}, simulated", zorder=3)
        serial, gemm, fused = FLUX_L20[kind]
        reported = 100 * (sim.efficiency(fused, gemm, serial) or 0.0)
        axes.plot(4096, reported, "xk", label="Flux on 8 x L20 (PCIe), as reported", zorder=4)
        axes.axhline(FLUX_BEST, color="0.4", linestyle="--", label="Flux's best, as reported")
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set(xlabel="rows of the layer's input, m")
        axes.set_xscale("log", base=2)
        axes.set_xticks([r["m"] for r in mine], [str(r["m"]) for r in mine], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yscale("symlog", linthresh=100, linscale=1.5)
        axes.yaxis.set_minor_locator(NullLocator())
        low = min([100 * r[f"{way}_efficiency"] for r in shown for way in ("fused", "ring")])
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
    """Speedup of a layer over one thing after the other, by layout.

    The mean over the numbers of tokens, at the imbalance nearest to 0.032. No line of the paper's:
    COMET reports times over other systems, which hide a part of their communication.
    """
    figure, (axes,) = panels(size=(7, 4), sharey=True)
    found = [r for r in rows if r["part"] == "layer"]
    std = min((r["std"] for r in found), key=lambda s: abs(s - 0.032))
    models = list(dict.fromkeys(r["model"] for r in found))
    layouts = list(dict.fromkeys((r["tensor"], r["expert"]) for r in found))
    highest = 0.0
    for i, model in enumerate(models):
        means = [
            np.mean([r["speedup"] for r in found
                     if (r["model"], r["tensor"], r["expert"], r["std"]) == (model, *layout, std)])
            for layout in layouts
        ]  # fmt: skip
        place = np.arange(len(layouts)) + (i - (len(models) - 1) / 2) * 0.25
        bars = axes.bar(place, means, 0.22, color=f"C{i}", label=model)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
        highest = max(highest, *means)
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_xticks(range(len(layouts)), ["{} x {}".format(*layout) for layout in layouts])
    axes.set(xlabel="tensor x expert", ylabel="times as fast as one after the other")
    axes.set_ylim(0, 1.35 * highest)
    axes.legend(fontsize=8, frameon=False, ncols=len(models), loc="upper center")
    alike = [r for r in found if r["std"] == std]
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
        "flux_best_efficiency": FLUX_BEST / 100, "flux_l20_efficiency": l20,
        "comet_layer": COMET_LAYER, "comet_model": COMET_MODEL,
    }  # fmt: skip
