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

from experiments.reports.pruning_study import DENSE, Method
from megajax.core.errors import UserError
from megajax.core.files import or_nan
from megajax.core.hardware import CARDS
from megajax.cost.sparse import Gemm, SparseCost
from megajax.systems.pruning import prune
from megajax.training.masking import UnitScore
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
WHAT = {"passages": "encoder, passages", "text": "nano GPT, text"}


def key(row: Mapping[str, Any]) -> Key:
    """What identifies a point: stages are the sparsities that its chain has passed."""
    return row["task"], row["seed"], row["method"], row["stages"]


def former(path: Path) -> dict[Key, Row]:
    """Returns the points that a file holds, none if it is not there. Raises: UserError."""
    try:
        rows = json.loads(path.read_text())["rows"]
        for row in rows:
            row["loss"] = or_nan(row["loss"])  # null: training diverged
        return {key(row): row for row in rows}
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
        """Returns the work of both."""
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def floor_s(self) -> float:
        """No kernel is faster on an H200."""
        return CARDS["H200"].floor_s(self.flops, self.bytes)


def dense_work(rows: int, shape: tuple[int, int]) -> Work:
    """Returns the work of a dense product of `rows` rows."""
    K, N = shape
    return Work(2.0 * rows * K * N, 2.0 * (rows * (K + N) + K * N))


def sparse_work(rows: int, weight: TileSparse) -> Work:
    """Returns a packed weight's work: whole slots are multiplied, unread columns of x not moved."""
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
