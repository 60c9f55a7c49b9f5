"""What pruning cost and what it saves: rows, a verdict and figures of a study.

Quality is measured on trained models (reports/pruning_study.py). Speed is that of products of the
paper's BERT (arXiv 2008.13006; 12,800 tokens, matrices 768 and 3072 wide): masks come from trained
scores, enlarged, and are packed as the kernels take them; from the packed weights FLOPs and bytes
are exact. Floors divide them by an H200's peaks, which no kernel reaches; times are the cost
model's ESTIMATES (cost/sparse.py) with assumed efficiencies. What only a GPU can tell is not here.

A coarser chunk is faster and prunes worse: each speed-up stands beside the loss of its own chunk.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.reports.pruning_study import DENSE, METHODS, Method
from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.cost.sparse import Gemm, SparseCost
from megajax.systems.pruning import prune
from megajax.training.masking import UnitScore
from pallas_kernels.attention.cases import PEAK_BYTES, PEAK_FLOPS
from pallas_kernels.tile_sparse.format import TileSparse

Row = dict[str, Any]
Key = tuple[str, int, str, str]

TOKENS = 12800  # rows of every product that the paper times: batch 100, length 128
# (K, N), how often a layer of BERT base has it, and how many times faster the paper's kernel is at
# 75 % on a V100 (README of the paper's repository, stream GEMM, beside CUTLASS).
SHAPES = {
    "attention": ((768, 768), 4, 2.14),
    "up": ((768, 3072), 1, 2.04),
    "down": ((3072, 768), 1, 2.79),
}
PAPER = 1.95  # times, BERT and others over dense tensor cores at 75 % (abstract)
CLAIM = 0.5  # TW-1 is to lose at most this part of what BW loses, at CLAIM_AT
CLAIM_AT = 0.75
TILES, BLOCKS = ("TW-1", "TW-1a", "TW1D-1"), ("BW", "BW-64", "BW-128")
KERNEL_CHUNKS = (8, 16, 32, 64)  # what tile_sparse_matmul's Hopper kernels take
CARD = CARDS["H200"]
COLOURS = {
    "EW": "#000000", "VW": "#999999", "TEW": "#009E73", "TW-1": "#0072B2", "TW-1a": "#004466",
    "TW-8": "#56B4E9", "TW-32": "#CC79A7", "TW-64": "#E69F00", "TW1D-1": "#7A6FF0",
    "BW": "#D55E00", "BW-64": "#A63A00", "BW-128": "#6B2500",
}  # fmt: skip
WHAT = {"passages": "encoder, passages", "text": "nano GPT, text"}


def key(row: Mapping[str, Any]) -> Key:
    """What identifies a point: stages are the sparsities that its chain has passed."""
    return row["task"], row["seed"], row["method"], row["stages"]


def former(path: Path) -> dict[Key, Row]:
    """Returns the points that a file holds, none if it is not there. Raises: UserError."""
    try:
        return {key(row): row for row in json.loads(path.read_text())["rows"]}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} holds no points: {error!r}; remove it (--state)") from None


# ---- quality


def quality(points: Sequence[Row]) -> Iterator[Row]:
    """Yields mean and standard deviation over the seeds of what each point loses.

    Against the dense model of the same seed, fine-tuned as long: lost, nats a prediction, and
    lost_accuracy, a fraction. n: seeds; with one there is no deviation (None).
    """
    dense = {(r["task"], r["seed"], r["goal"]): r for r in points if r["method"] == DENSE}
    curves = dict.fromkeys((r["task"], r["method"], r["goal"]) for r in points if r["goal"] > 0)
    for task, method, goal in curves:
        found, lost = [], []
        for row in points:
            base = dense.get((task, row["seed"], goal))
            if base and (row["task"], row["method"], row["goal"]) == (task, method, goal):
                found.append(row)
                both = row["loss"] - base["loss"], base["accuracy"] - row["accuracy"]
                lost.append(both)
        if not found:
            continue
        row = {"part": "quality", "task": task, "method": method, "goal": goal, "n": len(found)}
        columns = {name: [r[name] for r in found] for name in ("sparsity", "loss", "accuracy")}
        columns |= dict(zip(("lost", "lost_accuracy"), zip(*lost, strict=True), strict=True))
        for name, values in columns.items():
            row[name] = float(np.mean(values))
            row[f"{name}_std"] = float(np.std(values, ddof=1)) if len(found) > 1 else None
        yield row


def claims(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields whether tile-wise with chunk 1 loses at most half of what blocks lose at 75 %.

    For each model, each size of blocks, both ways of pruning by tiles, loss and accuracy. ratio:
    None where blocks lose nothing.
    """
    at = {(r["task"], r["method"]): r for r in rows if r["goal"] == CLAIM_AT}
    pairs = itertools.product(dict.fromkeys(task for task, _ in at), TILES, BLOCKS)
    for task, tiles, blocks in pairs:
        if {(task, tiles), (task, blocks)} <= at.keys():
            tw, bw = at[task, tiles], at[task, blocks]
            for name in ("lost", "lost_accuracy"):
                yield {
                    "part": "claim", "task": task, "what": name, "tiles": tiles, "blocks": blocks,
                    "tw": tw[name], "bw": bw[name],
                    "tw_std": tw[f"{name}_std"], "bw_std": bw[f"{name}_std"], "n": tw["n"],
                    "ratio": tw[name] / bw[name] if bw[name] > 0 else None,
                    "met": bool(bw[name] > 0 and tw[name] <= CLAIM * bw[name]),
                }  # fmt: skip


# ---- speed


@dataclasses.dataclass(frozen=True)
class Work:
    """One product y = x w in 16 bits. bytes: each operand and result once, indices too."""

    flops: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        """Of both."""
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def floor_s(self) -> float:
        """No kernel is faster on an H200."""
        return max(self.flops / PEAK_FLOPS, self.bytes / PEAK_BYTES)


def dense_work(rows: int, shape: tuple[int, int]) -> Work:
    """Of a dense product of `rows` rows."""
    K, N = shape
    return Work(2.0 * rows * K * N, 2.0 * (rows * (K + N) + K * N))


def sparse_work(rows: int, weight: TileSparse) -> Work:
    """Of a packed weight: whole slots are multiplied; x's columns that none reads are not moved."""
    K, N = weight.shape
    pattern = weight.pattern
    slots = int(pattern.tile_starts[-1])
    used = np.unique(np.asarray(pattern.chunks)[:slots])
    # Dead slots, which fill up a step of the kernel, have a chunk beyond the last.
    read = int(np.clip(K - used * pattern.chunk, 0, pattern.chunk).sum())
    entries = slots * pattern.chunk * pattern.tile
    # chunk ids and tile ids of slots; first slot and place in the order of tiles; columns.
    indices = 4.0 * (2 * slots + 2 * pattern.tile_order.size + 1 + pattern.columns.size)
    return Work(2.0 * rows * entries, 2.0 * (rows * (read + N) + entries) + indices)


def enlarge(scores: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Repeats rows and columns of scores (k, n) until they have a shape that k and n divide."""
    for axis, size in enumerate(shape):
        scores = np.repeat(scores, size // scores.shape[axis], axis)
    return scores


def speeds(
    scores: Mapping[str, np.ndarray],
    methods: Sequence[Method],
    stages: Sequence[float],
    unit_score: UnitScore = "rms",
) -> Iterator[Row]:
    """Yields the counted work of the paper's shapes, each pruned alone to each sparsity.

    scores: of SHAPES' names, matrices (k, n) that divide them. methods: tile-wise ones; others are
    passed over, because no kernel multiplies them faster than dense ones. unit_score: of `prune`.
    """
    for name, (shape, _, paper) in SHAPES.items():
        dense, found = dense_work(TOKENS, shape), enlarge(scores[name], shape)
        for goal in stages:
            for method in methods:
                if method.pattern != "tw2d" or method.apriori:
                    continue
                mask = prune(
                    found, found, goal, pattern=method.pattern, tile=method.tile,
                    chunk=method.chunk, unit_score=unit_score,
                )  # fmt: skip
                weight = TileSparse.from_dense(
                    jnp.zeros(shape, jnp.float16), mask, tile=method.tile, chunk=method.chunk
                )
                yield _speed(name, method, goal, dense, sparse_work(TOKENS, weight), weight) | {
                    "paper": paper if goal == CLAIM_AT else None
                }


def _speed(
    name: str, method: Method, goal: float, dense: Work, ours: Work, weight: TileSparse
) -> Row:
    gemm = Gemm(name, TOKENS, *weight.shape)
    cost = SparseCost(CARD, tile=method.tile, chunk=method.chunk)
    estimates = cost.dense_time(gemm), cost.sparse_time(gemm, weight.density)
    return {
        "part": "speed", "shape": name, "method": method.name, "goal": goal,
        "tile": method.tile, "chunk": method.chunk, "kept": weight.density,
        "multiplied": weight.stored, "gflop_dense": dense.flops / 1e9,
        "gflop": ours.flops / 1e9, "mb_dense": dense.bytes / 1e6, "mb": ours.bytes / 1e6,
        "flops_saved": dense.flops / ours.flops, "bytes_saved": dense.bytes / ours.bytes,
        "floor_us_dense": 1e6 * dense.floor_s, "floor_us": 1e6 * ours.floor_s,
        "speedup_floor": dense.floor_s / ours.floor_s,
        "estimate_us_dense": 1e6 * estimates[0], "estimate_us": 1e6 * estimates[1],
        "speedup_estimate": estimates[0] / estimates[1],
        "kernel": method.chunk in KERNEL_CHUNKS,
    }  # fmt: skip


def prices(rows: Sequence[Row], speeds: Sequence[Row]) -> Iterator[Row]:
    """Yields for each chunk and sparsity what a layer of BERT gains and what OUR models lose.

    The speed-up is of a layer's six products one after the other; the loss that of the same tile
    and chunk, divided by 4 with the matrices (chunk 1 is not).
    """
    for goal, name in dict.fromkeys((r["goal"], r["method"]) for r in speeds):
        mine = [r for r in speeds if (r["goal"], r["method"]) == (goal, name)]
        times = {r["shape"]: SHAPES[r["shape"]][1] for r in mine}

        def total(member: str, mine: list = mine, times: dict = times) -> float:
            return sum(times[r["shape"]] * r[member] for r in mine)

        row = {
            "part": "price", "method": name, "goal": goal, "tile": mine[0]["tile"],
            "chunk": mine[0]["chunk"], "kernel": mine[0]["kernel"],
            "flops_saved": total("gflop_dense") / total("gflop"),
            "bytes_saved": total("mb_dense") / total("mb"),
            "speedup_floor": total("floor_us_dense") / total("floor_us"),
            "speedup_estimate": total("estimate_us_dense") / total("estimate_us"),
        }  # fmt: skip
        for found in rows:
            if (found["method"], found["goal"]) == (name, goal):
                for member in ("lost", "lost_std", "lost_accuracy", "lost_accuracy_std", "n"):
                    row[f"{found['task']}_{member}"] = found[member]
        yield row


# ---- figures


def draw_quality(rows: Sequence[Row], claim: Sequence[Row], path: Path) -> None:
    """What each pattern loses at each sparsity, a panel for each model; SVG and PNG.

    Sparsities stand at equal distances, patterns side by side at each of them.
    """
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    shown = [name for name in METHODS if any(r["method"] == name for r in rows)]
    figure, panels = _figure(len(tasks))
    for axes, task in zip(panels, tasks, strict=True):
        goals = sorted({r["goal"] for r in rows if r["task"] == task} | {0.0})
        for i, name in enumerate(shown):
            mine = [r for r in rows if (r["task"], r["method"]) == (task, name)]
            if mine:
                aside = 0.6 * ((i + 0.5) / len(shown) - 0.5)
                at = [0.0, *(goals.index(r["goal"]) + aside for r in mine)]
                bars = [0.0, *(r["lost_std"] or 0.0 for r in mine)]
                axes.errorbar(
                    at, [0.0, *(r["lost"] for r in mine)], bars, color=COLOURS[name], label=name,
                    marker="o", markersize=3, capsize=1.5, linewidth=0.9,
                    linestyle="--" if name.startswith("BW") else ":" if name == "TW-1a" else "-",
                )  # fmt: skip
        seeds = [r["n"] for r in rows if r["task"] == task]
        count = f"{min(seeds)} to {max(seeds)}" if min(seeds) < max(seeds) else f"{seeds[0]}"
        axes.set_title(f"{WHAT[task]}: seeds {count}", fontsize=9, loc="left")
        axes.set_xticks(range(len(goals)), [f"{100 * g:g}" for g in goals])
        axes.set(xlabel="weights pruned (%)", ylabel="held-out loss above dense (nats)")
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, frameon=False,
                  loc="outside right center")  # fmt: skip
    found = [
        f"{r['ratio']:.2f} of that with {r['blocks']}"
        for r in claim
        if (r["what"], r["tiles"], r["task"]) == ("lost", "TW-1", tasks[-1]) and r["ratio"]
    ]
    title = f"{WHAT[tasks[-1]]}, pruned by 75 %: with TW-1 it loses {', '.join(found)}"
    _save(figure, title if found else "What each pattern loses", path)


def draw_price(rows: Sequence[Row], path: Path) -> None:
    """Estimated speed-up against loss, chunk by chunk, at each sparsity; the paper's dashed."""
    from matplotlib.lines import Line2D

    tasks = [t for t in WHAT if any(f"{t}_lost" in r for r in rows)]
    figure, panels = _figure(len(tasks))
    marks = dict(zip(dict.fromkeys(r["goal"] for r in rows), "osD^vP" * 4, strict=False))
    for axes, task in zip(panels, tasks, strict=True):
        for r in (r for r in rows if f"{task}_lost" in r):
            axes.errorbar(
                r[f"{task}_lost"], r["speedup_estimate"], xerr=r[f"{task}_lost_std"] or 0.0,
                marker=marks[r["goal"]], markersize=5, capsize=2, color=COLOURS[r["method"]],
                elinewidth=0.7, markerfacecolor=None if r["kernel"] else "white",
            )  # fmt: skip
        axes.axhline(PAPER, color="0.4", linestyle="--", linewidth=1)
        axes.locator_params(axis="x", nbins=5)
        axes.set_title(WHAT[task], fontsize=9, loc="left")
        axes.set(xlabel="held-out loss above dense (nats)", ylabel="estimated speed-up (times)")
        axes.set_ylim(1, 1.05 * max([PAPER, *(r["speedup_estimate"] for r in rows)]))
        axes.spines[["top", "right"]].set_visible(False)

    def point(colour: str, mark: str, text: str, face: str | None = None) -> Line2D:
        return Line2D(
            [], [], color=colour, marker=mark, linestyle="", markerfacecolor=face, label=text
        )

    names = [n for n in METHODS if any(r["method"] == n for r in rows)]
    shown = [point(COLOURS[n], "o", n) for n in names]
    shown += [point("0.4", mark, f"{100 * goal:g} % pruned") for goal, mark in marks.items()]
    shown.append(point("0.4", "o", "no kernel takes\nthis chunk", "white"))
    shown.append(Line2D([], [], color="0.4", linestyle="--", label=f"paper, 75 %,\nV100: {PAPER}"))
    figure.legend(handles=shown, fontsize=8, frameon=False, loc="outside right center")
    _save(figure, _price_title(rows, tasks), path)


def _price_title(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    at = {r["method"]: r for r in rows if r["goal"] == CLAIM_AT}
    if not tasks or not {"TW-1", "TW-64"} <= at.keys():
        return "What coarse chunks cost (speed-ups are estimates)"
    parts = (
        f"{at['TW-64'][f'{t}_lost'] - at['TW-1'][f'{t}_lost']:+.2f} nats ({t})"
        for t in tasks
        if all(f"{t}_lost" in at[m] for m in ("TW-1", "TW-64"))
    )
    gain = at["TW-64"]["speedup_estimate"]
    return (
        f"Chunks of 64 rows, estimated {gain:.2f} times dense at 75 %, cost {', '.join(parts)} "
        "over chunk 1"
    )


def _figure(panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * panels, 4.2), dpi=120, layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _save(figure: Any, title: str, path: Path) -> None:
    from matplotlib import rc_context

    figure.suptitle(title, fontsize=10)
    with rc_context({"svg.hashsalt": path.name}):  # the same figure is the same file
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"))
