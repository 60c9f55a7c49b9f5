"""The detectors that Minder's evaluation compares, and our detector without each of its parts.

Every rival learns from the jobs that our detector is fitted on, and its threshold, its score and
how many alerts it gives are those with the highest F1 on the same validation cases. A rival is a
function from a case to scores of machines; one rule turns scores into alerts.

Legend: C metrics, M streams, N machines, T seconds, J windows, W seconds of a window, B windows of
a batch, D numbers of a window or point, H units of a network or ticks of 24 s, F channels.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megajax.core import files
from megajax.core.tree import Tree, named_leaves, nest
from megajax.models import lstm_vae
from megajax.models.lstm_vae import LstmVaeConfig
from megajax.monitor.fleet import METRICS, Case
from megajax.monitor.samples import Grid
from megajax.monitor.sources.convert import MINDER, WATCHED
from megajax.systems.minder import Detector, Settings, features, tracker

# ---- a case
#
# A case as the rivals see it: seconds scaled, holes filled, windows of 8 s side by side.
#
# The preparation is the paper's (Minder section 4.1: align, fill a hole with the nearest sample,
# scale to [0, 1]), with two gifts: packet rates are scaled by their logarithms and ranges are
# quantiles, as our detector does it; and a machine is left out while it is not a member of the job
# (before its first sample, after its declared departure), since a scheduler would say so.
#
# Legend: C metrics, N machines, T seconds, J windows, W seconds of a window.


WINDOW = 8  # seconds, side by side (paper: one starts every second)
ROWS = 4096  # windows that go through the networks at a time


class Said(NamedTuple):
    """An alert of any detector. at, since: Unix seconds. score: a number in the detector's unit."""

    machine: str
    metric: str
    since: float
    at: float
    score: float
    kind: str


@dataclass(frozen=True)
class Base:
    """The parts that rivals share with a fit of our detector: metrics in order, their ranges (low,
    high, bend) and the networks.

    It has a file of its own, so that later changes of our detector do not change the rivals.
    """

    metrics: tuple[str, ...]
    range_3C: np.ndarray
    vae: Tree

    @staticmethod
    def of(detector: Detector) -> "Base":
        """Returns the base of a fitted detector."""
        profile = detector.profile
        return Base(profile.metrics, profile.range_3C, profile.vae)

    def save(self, path: Path) -> None:
        """Writes an archive without pickles."""
        arrays = {f"vae.{name}": np.asarray(leaf) for name, leaf in named_leaves(self.vae)}
        about = {"metrics": np.array(self.metrics), "ranges": self.range_3C}
        files.write_arrays(path, about | arrays)

    @staticmethod
    def load(path: Path) -> "Base":
        """Reads what `save` wrote."""
        arrays = files.read_arrays(path, "shared model of the rivals")
        vae = nest({n[4:]: x for n, x in arrays.items() if n.startswith("vae.")})
        return Base(tuple(str(m) for m in arrays["metrics"]), arrays["ranges"], vae)

    def scaled(self, values_CNT: np.ndarray) -> np.ndarray:
        """Returns values scaled so that the healthy range is the middle third of [0, 1], and
        clipped there; metrics with a bend are transformed by asinh(value / bend) first."""
        low, high, bend = (x[:, None, None] for x in self.range_3C)
        bent = np.arcsinh(values_CNT / np.where(bend > 0, bend, 1.0))
        values = np.where(bend > 0, bent, values_CNT)
        return np.clip((values - low) / (3 * (high - low)) + 1 / 3, 0, 1).astype(np.float32)


@dataclass(frozen=True)
class View:
    """A case as a detector sees it. departures: (machine, Unix s)."""

    grid: Grid
    departures: Sequence[tuple[str, float]]
    base: Base

    @property
    def windows(self) -> int:
        """Whole windows of the case."""
        return self.grid.values_CNT.shape[2] // WINDOW

    def time(self, window: int) -> float:
        """Returns the end of a window, Unix s."""
        return self.grid.start + (window + 1) * WINDOW

    @cached_property
    def raw_CNT(self) -> np.ndarray:
        """Seconds in the order of the base's metrics, in their units, NaN for holes."""
        grid = self.grid
        rows = [grid.metrics.index(m) for m in self.base.metrics]
        return grid.values_CNT[rows, :, : self.windows * WINDOW]

    @cached_property
    def filled_CNT(self) -> np.ndarray:
        """Scaled seconds; a missing sample has the value of the nearest one of its series, 0.5 if
        there is none."""
        return nearest(self.base.scaled(self.raw_CNT))

    @cached_property
    def x_CNJW(self) -> np.ndarray:
        """Scaled seconds, divided into windows."""
        C, N, _ = self.filled_CNT.shape
        return self.filled_CNT.reshape(C, N, self.windows, WINDOW)

    @cached_property
    def denoised_CNJW(self) -> np.ndarray:
        """The windows as the LSTM-VAEs reconstruct them."""
        C, N, J, W = self.x_CNJW.shape
        rows_XWC = self.x_CNJW.reshape(C, N * J, W).transpose(1, 2, 0)
        back = in_parts(lambda x: _denoise(LstmVaeConfig(C), self.base.vae, x), rows_XWC)
        return back.transpose(2, 0, 1).reshape(C, N, J, W)

    @cached_property
    def cache(self) -> dict[str, np.ndarray]:
        """Arrays that several rivals compute, by name."""
        return {}

    @cached_property
    def there_JN(self) -> np.ndarray:
        """Whether a machine is a member of the job at the end of a window."""
        seen_NT = np.isfinite(self.raw_CNT).any(0)
        joined_N = np.where(seen_NT.any(1), seen_NT.argmax(1), seen_NT.shape[1])
        end_J = (np.arange(self.windows) + 1) * WINDOW
        there_JN = end_J[:, None] > joined_N
        for machine, at in self.departures:
            row = self.grid.machines.index(machine)
            there_JN[end_J + self.grid.start >= at - 4, row] = False  # clocks are up to 2 s wrong
        return there_JN


def nearest(values_CNT: np.ndarray) -> np.ndarray:
    """Returns the values with each NaN replaced by the nearest sample of its series, the earlier
    one of two at the same distance; 0.5 where a series has none."""
    T = values_CNT.shape[-1]
    has, now_T = np.isfinite(values_CNT), np.arange(T)
    before = np.maximum.accumulate(np.where(has, now_T, -2 * T), -1)
    after = np.minimum.accumulate(np.where(has, now_T, 3 * T)[..., ::-1], -1)[..., ::-1]
    place = np.where(now_T - before <= after - now_T, before, after)
    none = (place < 0) | (place >= T)
    filled = np.take_along_axis(values_CNT, np.where(none, 0, place), -1)
    return np.where(none, np.float32(0.5), filled)


def in_parts(function: Any, rows_X: np.ndarray, rows: int = ROWS) -> np.ndarray:
    """Returns function(rows_X), computed `rows` rows at a time, so that all lengths run one
    program."""
    parts = []
    for at in range(0, len(rows_X), rows):
        part = rows_X[at : at + rows]
        pad = [(0, rows - len(part))] + [(0, 0)] * (part.ndim - 1)
        parts.append(np.asarray(function(np.pad(part, pad)))[: len(part)])
    return np.concatenate(parts)


_denoise = jax.jit(lstm_vae.denoise, static_argnums=0)


# ---- one network for all metrics
#
# INT: one LSTM-VAE for all metrics at once (Minder section 6), in plain JAX.
#
# The same shape as models/lstm_vae.py but for its inputs and outputs, which are all metrics, and
# its units and latent, which are larger (chosen: 16 and 8, a network has seven times as much to
# say).
#
# Legend: B windows, W seconds, C metrics, H units.


Learnt = dict[str, np.ndarray]
UNITS, LATENT, BATCH, RATE = 16, 8, 512, 1e-2
KL = 8e-4  # as of models/lstm_vae.py


def begin(key: jax.Array, metrics: int) -> dict[str, jax.Array]:
    """Returns random weights."""
    shapes = {
        "encode": (metrics + UNITS, 4 * UNITS),
        "latent": (UNITS, 2 * LATENT),
        "decode": (LATENT + UNITS, 4 * UNITS),
        "out": (UNITS + LATENT, metrics),
    }
    keys = jax.random.split(key, len(shapes))
    made = {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return made | {f"{name}_bias": jnp.zeros(shape[1]) for name, shape in shapes.items()}


def _lstm(w: dict, name: str, state: tuple, x: jax.Array) -> tuple:
    gates = jnp.concatenate([x, state[0]], -1) @ w[name] + w[f"{name}_bias"][None]
    i, f, g, o = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(f + 1.0) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def both(w: dict, x_BWC: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns (reconstructed windows, KL_B). key: random key of the latent's noise; None: the mean
    of the latent is decoded."""
    zeros = jnp.zeros((len(x_BWC), UNITS))
    state = (zeros, zeros)
    state, _ = jax.lax.scan(
        lambda s, x: (_lstm(w, "encode", s, x), None), state, x_BWC.swapaxes(0, 1)
    )
    mean, log_var = jnp.split(state[0] @ w["latent"] + w["latent_bias"][None], 2, -1)
    log_var = jnp.clip(log_var, -12.0, 4.0)
    z = mean
    if key is not None:
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)

    def second(s: tuple, _: None) -> tuple:
        s = _lstm(w, "decode", s, z)
        return s, jnp.concatenate([s[0], z], -1) @ w["out"] + w["out_bias"][None]

    _, back = jax.lax.scan(second, (zeros, zeros), None, x_BWC.shape[1])
    return back.swapaxes(0, 1), 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1)


@jax.jit
def denoise(w: dict, x_BWC: jax.Array) -> jax.Array:
    """Returns the windows as the network gives them back."""
    return both(w, x_BWC, None)[0]


def train(x_BWC: np.ndarray, seed: int, steps: int) -> Learnt:
    """Returns the trained weights. x: windows in [0, 1] without holes."""
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps, 0.02))
    weights = begin(jax.random.key(seed), x_BWC.shape[2])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w: dict, state: optax.OptState, x: jax.Array, key: jax.Array) -> tuple:
        def loss(w: dict) -> jax.Array:
            back, kl_B = both(w, x, key)
            return ((back - x) ** 2).mean() + KL * kl_B.mean() / x.shape[2]

        updates, state = optimizer.update(jax.grad(loss)(w), state)
        return optax.apply_updates(w, updates), state

    state, rng = optimizer.init(weights), np.random.default_rng(seed)
    for number in range(steps):
        x = jnp.asarray(x_BWC[rng.integers(0, len(x_BWC), BATCH)])
        weights, state = step(weights, state, x, jax.random.fold_in(jax.random.key(seed), number))
    return jax.tree.map(np.asarray, weights)


# ---- distances
#
# The paper's detector and its variants: sums of distances between machines, window by window.
#
# Minder section 4.3: d_i is the sum, over the other machines, of the distance between the
# reconstructed windows of machine i and theirs. RAW (section 6): distances of the windows
# themselves. CON: distances of the concatenated windows of all metrics. INT: distances of what one
# network for all metrics reconstructs. MEDIAN is no variant of the paper: the distance of a
# window's mean from that of the median machine.
#
# Legend: C metrics, M streams, N machines, J windows, D numbers of a window.


DISTANCES = ("euclid", "manhattan", "chebyshev")
WINDOWS = 64  # windows that one call of the compiled function takes


def sums(e_JND: np.ndarray, measure: str = "euclid") -> np.ndarray:
    """Returns d_JN, the sum of the distances from each machine to all others."""
    return in_parts(lambda e: _sums(e, measure), e_JND, WINDOWS)


@functools.partial(jax.jit, static_argnums=1)
def _sums(e_JND: jax.Array, measure: str) -> jax.Array:

    def euclid(e_ND: jax.Array) -> jax.Array:
        e_ND = e_ND - e_ND.mean(0, keepdims=True)  # so that the products below lose no digits
        square_N = (e_ND * e_ND).sum(1)
        product = jnp.matmul(e_ND, e_ND.T, precision="highest")
        square_NN = square_N[:, None] + square_N[None] - 2 * product
        square_NN = jnp.where(jnp.eye(len(e_ND), dtype=bool), 0.0, square_NN)
        return jnp.sqrt(jnp.maximum(square_NN, 0.0)).sum(1)

    def other(e_ND: jax.Array) -> jax.Array:
        apart_NND = jnp.abs(e_ND[:, None] - e_ND[None])
        each = apart_NND.sum(2) if measure == "manhattan" else apart_NND.max(2)
        return each.sum(1)

    return jax.lax.map(euclid if measure == "euclid" else other, e_JND)


def of_metrics(view: View, _: Learnt, source: str, measure: str = "euclid") -> np.ndarray:
    """Returns d_MJN, a stream a metric. source: 'x' (RAW) or 'denoised'."""
    name = f"{source} {measure}"
    if name not in view.cache:
        windows = view.x_CNJW if source == "x" else view.denoised_CNJW
        C, N, J, W = windows.shape
        e_XNW = windows.swapaxes(1, 2).reshape(C * J, N, W)
        view.cache[name] = sums(e_XNW, measure).reshape(C, J, N)
    return view.cache[name]


def concatenated(view: View, _: Learnt) -> np.ndarray:
    """Returns d_MJN of one stream: the metrics' denoised windows one after the other (CON)."""
    C, N, J, W = view.denoised_CNJW.shape
    e_JND = view.denoised_CNJW.transpose(2, 1, 0, 3).reshape(J, N, C * W)
    return sums(e_JND)[None]


def of_one_network(view: View, learnt: Learnt) -> np.ndarray:
    """Returns d_MJN of one stream: all metrics through one LSTM-VAE (INT)."""
    C, N, J, W = view.x_CNJW.shape
    x_XWC = view.x_CNJW.transpose(1, 2, 3, 0).reshape(N * J, W, C)
    back = in_parts(lambda x: denoise(learnt, x), x_XWC)
    e_JND = back.reshape(N, J, W * C).swapaxes(0, 1)
    return sums(e_JND)[None]


def from_median(view: View, _: Learnt) -> np.ndarray:
    """Returns how far the mean of each window lies from the median machine's, (M, J, N)."""
    mean_CJN = view.x_CNJW.mean(3).swapaxes(1, 2)
    mean_CJN = np.where(view.there_JN, mean_CJN, np.nan)
    return np.abs(np.nan_to_num(mean_CJN - np.nanmedian(mean_CJN, 2, keepdims=True)))


# ---- from scores to alerts
#
# From scores of machines by window to alerts: the paper's rule, and how its threshold is tuned.
#
# Minder section 4.3 and 4.4: of the machines of a window, the one with the highest score is the
# candidate if that is above a threshold; a machine that has been the candidate for the continuity,
# window after window, is named. Metrics are looked at in their order of priority.
#
# Legend: M streams (metrics in order, or one of all), J windows, N machines.


CONTINUITY = 240 // WINDOW  # windows: the paper's four minutes
# How a sum of distances becomes a score. z: the paper's; it is at most sqrt(n - 1).
SCORES = ("z", "share", "ratio", "mad", "plain")


@dataclass(frozen=True)
class Trace:
    """The candidates of a case.

    who, high: (2, M, J); the two machines with the highest scores in each stream and window, and
    these scores. A case is judged by them alone, so trying another threshold costs nothing.
    """

    who: np.ndarray
    high: np.ndarray
    strengths: dict = field(default_factory=dict)  # those that were computed, by (out, need)

    def strength(self, out: int, need: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns two arrays (M, J): the lowest score of the last `need` windows, -inf where they
        do not have one candidate; and the candidate.

        out: a machine that is no candidate; -1: none.
        """
        if (out, need) not in self.strengths:
            is_out = self.who[0] == out
            who_MJ = np.where(is_out, self.who[1], self.who[0])
            high_MJ = np.where(is_out, self.high[1], self.high[0])
            lowest = np.full(who_MJ.shape, -np.inf)
            if who_MJ.shape[1] >= need:
                lasts = np.lib.stride_tricks.sliding_window_view(who_MJ, need, 1)
                same = (lasts == lasts[..., :1]).all(2)
                low = np.lib.stride_tricks.sliding_window_view(high_MJ, need, 1).min(2)
                lowest[:, need - 1 :] = np.where(same, low, -np.inf)
            self.strengths[out, need] = lowest, who_MJ
        return self.strengths[out, need]


def trace(score_MJN: np.ndarray, there_JN: np.ndarray) -> Trace:
    """Returns the candidates; machines that are no members of the job are none."""
    score_MJN = np.where(there_JN, score_MJN, -np.inf)
    first_MJ = score_MJN.argmax(2)
    high_MJ = np.take_along_axis(score_MJN, first_MJ[..., None], 2)
    rest_MJN = score_MJN.copy()
    np.put_along_axis(rest_MJN, first_MJ[..., None], -np.inf, 2)
    second_MJ = rest_MJN.argmax(2)
    next_MJ = np.take_along_axis(rest_MJN, second_MJ[..., None], 2)
    high = np.stack([high_MJ[..., 0], next_MJ[..., 0]]).astype(np.float32)
    return Trace(np.stack([first_MJ, second_MJ]), high)


def normal(d_JN: np.ndarray, there_JN: np.ndarray, how: str) -> np.ndarray:
    """Returns scores of how far each machine's sum of distances is above the others'.

    how: z: standard deviations above the mean. share: z divided by the highest z that is possible
    with n machines. ratio: distance from the median, divided by the median. mad: distance from the
    median in median absolute deviations. plain: the sums themselves.
    """
    d_JN = np.where(there_JN, d_JN, np.nan).astype(np.float64)
    if how == "plain":
        return np.nan_to_num(d_JN)
    if how in ("z", "share"):
        middle, spread = np.nanmean(d_JN, 1, keepdims=True), np.nanstd(d_JN, 1, keepdims=True)
        n = there_JN.sum(1, keepdims=True)
        most = 1.0 if how == "z" else np.sqrt(np.maximum(n - 1, 1))
        return np.nan_to_num((d_JN - middle) / (spread * most + 1e-9))
    middle = np.nanmedian(d_JN, 1, keepdims=True)
    if how == "ratio":
        return np.nan_to_num((d_JN - middle) / (middle + 1e-9))
    spread = 1.4826 * np.nanmedian(np.abs(d_JN - middle), 1, keepdims=True)
    return np.nan_to_num((d_JN - middle) / (spread + 0.02 * middle + 1e-9))


def decide(
    candidates: Trace, threshold: float, need: int = CONTINUITY, most: int = 1
) -> list[tuple[int, int, int, float]]:
    """Returns [(window, machine, stream, score)] of the named machines in the order of naming.

    need: windows in a row. most: alerts of a case; the paper's call returns after the first. After
    an alert its machine is left out, and the windows are counted from 0 again.
    """
    named: list[tuple[int, int, int, float]] = []
    out, begin = -1, 0
    while len(named) < most:
        strength_MJ, who_MJ = candidates.strength(out, need)
        fires_MJ = strength_MJ > threshold
        fires_MJ[:, : min(begin + need - 1, fires_MJ.shape[1])] = False
        if not fires_MJ.any():
            break
        j = int(fires_MJ.any(0).argmax())
        m = int(fires_MJ[:, j].argmax())
        out, begin = int(who_MJ[m, j]), j + 1
        named.append((j, out, m, float(strength_MJ[m, j])))
    return named


def said(view: View, named: Sequence[tuple[int, int, int, float]], need: int, streams: Any) -> list:
    """Returns alerts. streams: names of the streams."""
    return [
        Said(view.grid.machines[n], streams[m], view.time(j) - need * WINDOW, view.time(j), s, "")
        for j, n, m, s in named
    ]


Options = Mapping[str, Any]
Tried = Callable[[Options], Sequence[tuple[int, int, int]]]  # -> (named, in vain, faults) by case


def f1(counts: Sequence[tuple[int, int, int]]) -> float:
    """Returns F1 of (named, in vain, faults) of all cases."""
    named, vain, faults = (sum(c[k] for c in counts) for k in range(3))
    return 2 * named / max(named + vain + faults, 1)


def best(choices: Iterator[Options], tried: Tried) -> tuple[Options, float]:
    """Returns the choice with the highest F1; of equals the first."""
    choice_of_best, high = None, -1.0
    for choice in choices:
        if (value := f1(tried(choice))) > high:
            choice_of_best, high = choice, value
    assert choice_of_best is not None
    return choice_of_best, high


# ---- rival: isolation forest
#
# Isolation forest (Liu, Ting, Zhou 2008) in NumPy: rare points are cut off after few cuts.
#
# Trees are complete binary trees in arrays, so that all points walk down a tree together. Points
# are a machine in 24 s: of each metric how far its mean lies from the median machine's, and from
# its own mean of the minutes before.
#
# Legend: X points, D numbers of a point, T trees, K nodes of a tree.


Forest = dict[str, np.ndarray]
TREES, SAMPLE, DEPTH = 64, 256, 8  # the paper's 256 points a tree, and so 8 levels
EULER = 0.5772156649


def average_path(points: np.ndarray) -> np.ndarray:
    """Returns the mean depth of an unsuccessful search among so many points."""
    points = np.asarray(points, np.float64)
    harmonic = np.log(np.maximum(points - 1, 1)) + EULER
    return np.where(
        points > 2,
        2 * harmonic - 2 * (points - 1) / np.maximum(points, 1),
        np.where(points == 2, 1.0, 0.0),
    )


def grow(x_XD: np.ndarray, seed: int) -> Forest:
    """Returns a forest: feature_TK, cut_TK, and depth_TK, the path length of a point that ends in a
    node (NaN: it goes on)."""
    rng = np.random.default_rng(seed)
    K = 2 ** (DEPTH + 1) - 1
    feature, cut = np.zeros((TREES, K), np.int32), np.zeros((TREES, K), np.float32)
    depth = np.full((TREES, K), np.nan, np.float32)
    for t in range(TREES):
        sample = x_XD[rng.choice(len(x_XD), min(SAMPLE, len(x_XD)), replace=False)]
        _split(rng, sample, 0, 0, feature[t], cut[t], depth[t])
    return {"feature": feature, "cut": cut, "depth": depth, "points": np.array(len(sample))}


def _split(
    rng: np.random.Generator,
    x_XD: np.ndarray,
    node: int,
    level: int,
    feature: np.ndarray,
    cut: np.ndarray,
    depth: np.ndarray,
) -> None:
    low, high = (x_XD.min(0), x_XD.max(0)) if len(x_XD) else (np.zeros(1), np.zeros(1))
    can = np.flatnonzero(high > low)
    if level == DEPTH or len(x_XD) <= 1 or not len(can):
        depth[node] = level + average_path(np.array(len(x_XD)))
        return
    d = feature[node] = rng.choice(can)
    cut[node] = np.float32(rng.uniform(low[d], high[d]))
    right = x_XD[:, d] >= cut[node]
    _split(rng, x_XD[~right], 2 * node + 1, level + 1, feature, cut, depth)
    _split(rng, x_XD[right], 2 * node + 2, level + 1, feature, cut, depth)


def score(forest: Forest, x_XD: np.ndarray) -> np.ndarray:
    """Returns 2 ** (-mean path / average path) of each point: towards 1 is rare, 0.5 is usual."""
    total_X = np.zeros(len(x_XD), np.float32)
    place_X = np.arange(len(x_XD))
    for feature_K, cut_K, depth_K in zip(
        forest["feature"], forest["cut"], forest["depth"], strict=True
    ):
        node_X = np.zeros(len(x_XD), np.int32)
        for _ in range(DEPTH):
            ends_X = np.isfinite(depth_K[node_X])
            right_X = x_XD[place_X, feature_K[node_X]] >= cut_K[node_X]
            node_X = np.where(ends_X, node_X, 2 * node_X + 1 + right_X)
        total_X += depth_K[node_X]
    usual = float(average_path(forest["points"]))
    return 2.0 ** (-total_X / len(forest["depth"]) / usual)


# ---- other rivals
#
# Rivals that are no variant of the paper: Mahalanobis, isolation forest, NVRx, Greyhound.
#
# Each returns scores of machines by window, (M streams, J windows, N machines), and says what was
# assumed where its source looks at other data than per-second metrics.
#
# Legend: C metrics, N machines, J windows of 8 s, H ticks of 24 s, D numbers, R run lengths.


TICK = 3  # windows
POINTS = 50_000  # to learn from


def apart(view: View) -> np.ndarray:
    """Returns the mean and the logarithm of the spread of each metric in each window, less those of
    the median machine, (J, N, 2 C)."""
    if "apart" not in view.cache:
        x_CNJW = view.x_CNJW
        spread = np.log(x_CNJW.std(3) + 1e-2)
        y_DNJ = np.concatenate([x_CNJW.mean(3), spread])
        y_DNJ = np.where(view.there_JN.T, y_DNJ, np.nan)
        y_DNJ = y_DNJ - np.nanmedian(y_DNJ, 1, keepdims=True)
        view.cache["apart"] = np.nan_to_num(y_DNJ.transpose(2, 1, 0)).astype(np.float32)
    return view.cache["apart"]


# ---- Mahalanobis distance (the paper's baseline)


def learn_covariance(views: Sequence[View], seed: int, steps: int) -> Learnt:
    """Returns the inverse covariance of healthy points.

    Assumed: the features are means and spreads of windows, because the paper only calls them
    statistics of windows. Values beyond 4 robust standard deviations are cut off, because the jobs
    have faults in them.
    """
    y_XD = sample([apart(v).reshape(-1, apart(v).shape[2]) for v in views], seed)
    sigma_D = 1.4826 * np.median(np.abs(y_XD), 0) + 1e-3
    cut_XD = np.clip(y_XD / sigma_D, -4, 4)
    inverse = np.linalg.inv(cut_XD.T @ cut_XD / len(cut_XD) + 1e-3 * np.eye(len(sigma_D)))
    return {"inverse": inverse / sigma_D / sigma_D[:, None]}


def mahalanobis(view: View, learnt: Learnt) -> np.ndarray:
    """Returns the length of each machine's point, one stream."""
    y_JND = apart(view).astype(np.float64)
    square = np.einsum("jnd,de,jne->jn", y_JND, learnt["inverse"], y_JND, optimize=True)
    return np.sqrt(np.maximum(square, 0))[None]


# ---- isolation forest


def points(view: View) -> np.ndarray:
    """Returns the means of the metrics in each tick, less those of the median machine and less the
    machine's own median of all ticks before, (H, N, 2 C)."""
    y_JND = apart(view)[..., : len(view.x_CNJW)]
    H = y_JND.shape[0] // TICK
    y_HND = y_JND[: H * TICK].reshape(H, TICK, *y_JND.shape[1:]).mean(1)
    own_HND = y_HND - np.stack([np.median(y_HND[: max(h, 1)], 0) for h in range(H)])
    return np.concatenate([y_HND, own_HND], 2)


def learn_forest(views: Sequence[View], seed: int, steps: int) -> Learnt:
    """Returns a forest of the points of healthy machines, and of the few faulty ones."""
    ticks = [points(v) for v in views]
    return grow(sample([p.reshape(-1, p.shape[2]) for p in ticks], seed), seed)


def isolation(view: View, learnt: Learnt) -> np.ndarray:
    """Returns each machine's score, one stream; each window has the score of its tick."""
    p_HND = points(view)
    score_HN = score(learnt, p_HND.reshape(-1, p_HND.shape[2])).reshape(p_HND.shape[:2])
    return by_window(score_HN[None], view.windows)


# ---- NVRx: relative and individual scores


def nvrx(view: View, _: Learnt, kind: str) -> np.ndarray:
    """Returns 1 - score of NVIDIA's resiliency extension (attribution/straggler/reporting.py): the
    reference's median time over the machine's, averaged over kernels; a straggler is below 0.75.

    relative: the reference is the best machine; individual: the best that the machine had so far.
    Assumed: there are no kernel times, so work done in a second stands for its inverse: means of
    duty cycle, power, graphics and tensor activity and NVLink traffic, each against its reference,
    with equal weights; the median is of four minutes (10 ticks), reported every tick.
    """
    rows = [c for c, m in enumerate(view.base.metrics) if m.startswith(("gpu_", "nvlink"))]
    raw_CNT = view.raw_CNT[rows]
    C, N, T = raw_CNT.shape
    H = T // (8 * TICK)
    parts = raw_CNT[..., : H * 8 * TICK].reshape(C, N, H, 8 * TICK)
    with np.errstate(invalid="ignore"):
        seen = np.isfinite(parts).sum(3)
        mean_CNH = np.where(seen > 0, np.nansum(parts, 3) / np.maximum(seen, 1), np.nan)
    lost = np.full((1, H, N), 0.0)
    best_CN = np.full((C, N), 1e-9)
    for h in range(9, H):
        part = mean_CNH[..., h - 9 : h + 1]
        there_CN = np.isfinite(part).sum(2) >= 5
        # Median over ticks of what is not NaN; 0 where nothing is.
        nothing = ~np.isfinite(part).any(2, keepdims=True)
        median_CN = np.where(there_CN, np.nanmedian(np.where(nothing, 0, part), 2), np.nan)
        if kind == "relative":
            reference = np.nanmax(np.where(there_CN, median_CN, 1e-9), 1, keepdims=True)
        else:
            best_CN = np.fmax(best_CN, median_CN)
            reference = best_CN
        score_CN = median_CN / np.maximum(reference, 1e-9)
        count_N = np.isfinite(score_CN).sum(0)
        lost[0, h] = np.where(count_N > 0, 1 - np.nansum(score_CN, 0) / np.maximum(count_N, 1), 0)
    return by_window(lost, view.windows)


# ---- Greyhound (ATC 2025; FALCON, arXiv 2410.12588)


def greyhound(view: View, _: Learnt, hazard: float = 1 / 100, least: int = 4) -> np.ndarray:
    """Returns how far each metric of a machine moved at its last change point, (C, J, N).

    Greyhound finds change points of iteration times with Bayesian online change-point detection
    (Adams and MacKay 2007) and confirms one where the means before and after differ by more than
    10 %. Assumed: the series are, for each machine and metric, the means of 24 s less the median
    machine's, as a share of the metric's range, because no iteration times are among the metrics
    and those of synchronous training are the same on all machines; the 10 % are the threshold that
    is tuned; a change counts once it has lasted `least` ticks.
    """
    y_JNC = apart(view)[..., : len(view.x_CNJW)]
    H = y_JNC.shape[0] // TICK
    y_HS = y_JNC[: H * TICK].reshape(H, TICK, -1).mean(1)
    moved_HS = changes(y_HS, hazard, least)
    N, C = y_JNC.shape[1:]
    return by_window(moved_HS.reshape(H, N, C).transpose(2, 0, 1), view.windows)


def changes(y_HS: np.ndarray, hazard: float, least: int) -> np.ndarray:
    """Returns |mean since the last change point - mean before it| of each series, by tick; 0 where
    there was none, or not for `least` ticks.

    The run length is the likeliest of its posterior under a normal model with unknown mean and
    variance (prior: mean 0, two observations' worth of the usual spread).
    """
    H, S = y_HS.shape
    spread_S = 1.4826 * np.median(np.abs(np.diff(y_HS, axis=0)), 0) / 2**0.5 + 5e-3
    y_HS = y_HS / spread_S
    sums_HS = np.concatenate([np.zeros((1, S)), np.cumsum(y_HS, 0)])
    log_RS = np.full((H + 1, S), -np.inf)
    log_RS[0] = 0.0
    mean_RS, kappa, alpha = np.zeros((H + 1, S)), 0.1 + np.arange(H + 1.0), 1 + np.arange(H + 1) / 2
    beta_RS = np.ones((H + 1, S))
    moved_HS = np.zeros((H, S))
    for h in range(H):
        n = h + 1
        scale_RS = beta_RS[:n] * ((kappa[:n] + 1) / (alpha[:n] * kappa[:n]))[:, None]
        t_RS = _student(y_HS[h] - mean_RS[:n], 2 * alpha[:n, None], scale_RS)
        grown = log_RS[:n] + t_RS + np.log1p(-hazard)
        most = grown.max(0)
        anew = most + np.log(np.exp(grown - most).sum(0)) + np.log(hazard / (1 - hazard))
        log_RS[1 : n + 1], log_RS[0] = grown, anew
        log_RS[: n + 1] -= log_RS[: n + 1].max(0)
        error = y_HS[h] - mean_RS[:n]
        beta_RS[1 : n + 1] = beta_RS[:n] + (kappa[:n] / (2 * (kappa[:n] + 1)))[:, None] * error**2
        mean_RS[1 : n + 1] = mean_RS[:n] + error / (kappa[:n, None] + 1)
        mean_RS[0], beta_RS[0] = 0.0, 1.0
        run_S = log_RS[: n + 1].argmax(0)
        begin_S = n - run_S
        after = (sums_HS[n] - np.take_along_axis(sums_HS, begin_S[None], 0)[0]) / np.maximum(
            run_S, 1
        )
        from_S = np.maximum(begin_S - 10, 0)
        before = np.take_along_axis(sums_HS, begin_S[None], 0) - np.take_along_axis(
            sums_HS, from_S[None], 0
        )
        before = before[0] / np.maximum(begin_S - from_S, 1)
        counts = (run_S >= least) & (begin_S >= 2)
        moved_HS[h] = np.where(counts, np.abs(after - before), 0.0) * spread_S
    return moved_HS


def _student(x: np.ndarray, freedom: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Returns the logarithm of Student's density with a squared scale."""
    from scipy.special import gammaln

    constant = gammaln((freedom + 1) / 2) - gammaln(freedom / 2) - 0.5 * np.log(np.pi * freedom)
    return constant - 0.5 * np.log(square) - (freedom + 1) / 2 * np.log1p(x**2 / freedom / square)


# ---- shared


def learn_integrated(views: Sequence[View], seed: int, steps: int) -> Learnt:
    """Returns INT's network."""
    rows = [v.x_CNJW.transpose(1, 2, 3, 0).reshape(-1, 8, len(v.x_CNJW)) for v in views]
    return train(sample(rows, seed), seed, steps)


def sample(rows: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Returns rows of all sources, POINTS at most, each source with its share."""
    every = np.concatenate(rows)
    rng = np.random.default_rng(seed)
    return every[np.sort(rng.choice(len(every), min(POINTS, len(every)), replace=False))]


def by_window(score_MHN: np.ndarray, windows: int) -> np.ndarray:
    """Returns the scores of ticks by window: a tick is known at its last window."""
    M, H, N = score_MHN.shape
    scores = np.zeros((M, windows, N), score_MHN.dtype)
    for j in range(TICK - 1, windows):
        scores[:, j] = score_MHN[:, min((j + 1) // TICK, H) - 1]
    return scores


# ---- the rivals by name


THRESHOLDS = 40  # tried between the median and the highest score of the tuning cases


def _nothing(views: Sequence[View], seed: int, steps: int) -> Learnt:
    return {}


@dataclass(frozen=True)
class Rival:
    """A detector that ours is compared with.

    scores: returns the scores of machines by window, (M, J, N). hows: those of SCORES among which
    tuning chooses. need: number of windows in a row. most: numbers of alerts in a case among which
    tuning chooses.
    """

    what: str
    scores: Callable[[View, Learnt], np.ndarray]
    learn: Callable[[Sequence[View], int, int], Learnt] = _nothing
    hows: tuple[str, ...] = SCORES[:-1]
    need: int = CONTINUITY
    most: tuple[int, ...] = (1, 2)

    def traces(self, view: View, learnt: Learnt) -> dict[str, Trace]:
        """Returns the candidates of a case by score."""
        d_MJN, there_JN = self.scores(view, learnt), view.there_JN
        return {
            how: trace(np.stack([normal(d, there_JN, how) for d in d_MJN]), there_JN)
            for how in self.hows
        }

    def choices(self, traces: Sequence[dict[str, Trace]]) -> Iterator[Mapping[str, Any]]:
        """Yields the options among which tuning chooses. traces: those of each tuning case."""
        for how in self.hows:
            high = np.concatenate([t[how].high[0].ravel() for t in traces])
            levels = 1 - np.geomspace(0.5, 1e-4, THRESHOLDS)
            limits = np.unique(np.quantile(high[np.isfinite(high)], levels))
            for limit, most in itertools.product(limits, self.most):
                yield {"how": how, "threshold": float(limit), "most": most}

    def named(self, traces: dict[str, Trace], tuned: Mapping[str, Any]) -> list:
        """Returns (window, machine, stream, score) of a case's alerts."""
        candidates = traces[tuned["how"]]
        return decide(candidates, tuned["threshold"], self.need, tuned["most"])

    def alerts(self, view: View, learnt: Learnt, tuned: Mapping[str, Any]) -> list[Said]:
        """Returns the alerts of a case."""
        only = dataclasses.replace(self, hows=(tuned["how"],))
        traces = only.traces(view, learnt)
        streams = view.base.metrics if len(traces[tuned["how"]].who[0]) > 1 else ("all",)
        return said(view, self.named(traces, tuned), self.need, streams)


_of = functools.partial(functools.partial, of_metrics)
MEASURES = ("minder-manhattan", "minder-chebyshev")  # for a comparison of distances only
_one = ("plain", *SCORES[:-1])
RIVALS: dict[str, Rival] = {
    "minder-paper": Rival(
        "Minder as published: sums of distances of denoised windows, z-score, 4 minutes, the first "
        "metric in the paper's order",
        _of(source="denoised"),
        hows=("z",),
        most=(1,),
    ),
    "minder-tuned": Rival(
        "minder-paper with the best of four scores and up to two alerts", _of(source="denoised")
    ),
    "no-continuity": Rival(
        "minder-tuned without continuity (section 6)", _of(source="denoised"), need=1
    ),
    "raw": Rival("distances of windows without a network (RAW, section 6)", _of(source="x")),
    "con": Rival("all metrics' denoised windows in one distance (CON)", concatenated),
    "int": Rival("one LSTM-VAE for all metrics (INT)", of_one_network, learn_integrated),
    "mahalanobis": Rival(
        "Mahalanobis distance of statistics of windows", mahalanobis, learn_covariance, hows=_one
    ),
    "median": Rival("distance from the median machine, no model", from_median, hows=_one),
    "forest": Rival("isolation forest (Liu et al. 2008)", isolation, learn_forest, hows=_one),
    "nvrx-relative": Rival(
        "NVRx's score beside the best machine",
        functools.partial(nvrx, kind="relative"),
        hows=("plain",),
        need=1,
    ),
    "nvrx-individual": Rival(
        "NVRx's score beside the machine's own best",
        functools.partial(nvrx, kind="individual"),
        hows=("plain",),
        need=1,
    ),
    "greyhound": Rival(
        "Bayesian change points, confirmed (Greyhound, ATC 2025)",
        greyhound,
        hows=("plain",),
        need=1,
    ),
    "minder-manhattan": Rival(
        "minder-tuned with Manhattan distances", _of(source="denoised", measure="manhattan")
    ),
    "minder-chebyshev": Rival(
        "minder-tuned with Chebyshev distances", _of(source="denoised", measure="chebyshev")
    ),
}


@dataclass(frozen=True)
class Tuned:
    """A rival with what it learnt, its tuned options, and its F1 on the tuning cases."""

    name: str
    learnt: Learnt
    tuned: Mapping[str, Any]
    f1: float

    def alerts(self, view: View) -> list[Said]:
        """Returns the alerts of a case."""
        return RIVALS[self.name].alerts(view, self.learnt, self.tuned)

    def save(self, path: Path) -> None:
        """Writes an archive without pickles."""
        head = json.dumps({"name": self.name, "tuned": dict(self.tuned), "f1": self.f1})
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_arrays(path, {"head": np.array(head), **self.learnt})

    @staticmethod
    def load(path: Path) -> "Tuned":
        """Reads what `save` wrote."""
        learnt = files.read_arrays(path, "tuned rival")
        head = json.loads(str(learnt.pop("head")))
        return Tuned(head["name"], learnt, head["tuned"], head["f1"])


Counted = Callable[[int, Sequence[Said]], tuple[int, int, int]]


def tune(
    names: Sequence[str],
    sources: Sequence[View],
    views: Iterator[View],
    counted: Counted,
    seed: int,
    steps: int,
) -> Iterator[Tuned]:
    """Yields each rival when it is tuned.

    sources: jobs to learn from. views: the tuning cases, one at a time. counted: returns (named, in
    vain, faults) for the number of a case and its alerts.
    """
    learnt = {name: RIVALS[name].learn(sources, seed, steps) for name in names}
    traces_of: dict[str, list] = {name: [] for name in names}
    cases = []
    for view in views:
        for name in names:
            traces_of[name].append(RIVALS[name].traces(view, learnt[name]))
        grid = dataclasses.replace(view.grid, values_CNT=view.grid.values_CNT[:, :, :0])
        cases.append(dataclasses.replace(view, grid=grid))  # without its data
    for name in names:
        rival = RIVALS[name]

        def tried(choice: Mapping[str, Any], rival: Rival = rival, name: str = name) -> list:
            counts = []
            for number, (view, traces) in enumerate(zip(cases, traces_of[name], strict=True)):
                named = rival.named(traces, choice)
                alerts = said(view, named, rival.need, view.base.metrics)  # by their order
                counts.append(counted(number, alerts))
            return counts

        choice, value = best(rival.choices(traces_of[name]), tried)
        yield Tuned(name, learnt[name], choice, value)


# ---- our detector
#
# Our detector as the evaluation runs it: in a job's order, with declared departures.


DECLARED = 10.0  # seconds after which a departure is declared: clocks are up to 2 s wrong


def our_alerts(path: str | Path, grid: Grid, departures: Sequence[tuple[str, float]]) -> list[Said]:
    """Returns the alerts of a detector without history. departures: (machine, Unix s)."""
    detector = Detector.load(path)
    declared = [(at + DECLARED, machine) for machine, at in departures]
    cuts = sorted({grid.start, grid.end, *(int(at) for at, _ in declared if at < grid.end)})
    alerts = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        for at, machine in declared:
            if int(at) == begin:
                detector.leave(machine)
        values = grid.values_CNT[:, :, begin - grid.start : end - grid.start]
        part = Grid(begin, 1, values, grid.machines, grid.metrics)
        alerts += detector.update(part)
    return [Said(a.machine, a.metric, a.since, a.at, a.score, a.kind) for a in alerts]


# ---- our detector without a part
#
# Our detector without one of its parts: fitted anew without it, and run without it.
#
# A part that no setting switches off is replaced for the time of a call, in the module where the
# detector looks it up. Networks are those of the whole detector where the metrics are the same.
#
# Legend: C metrics, F channels, N machines, J windows.


Patch = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Variant:
    """Our detector without one part.

    what: says what is left out. patches: replacements that hold while it is fitted and run.
    """

    what: str
    patches: tuple[Patch, ...] = ()
    settings: Settings = Settings()
    metrics: tuple[str, ...] = WATCHED


def _without_residual() -> Any:
    original = features.of_tick

    def of_tick(*args: Any, **kw: Any) -> Any:
        y_FNJ = original(*args, **kw)
        level_CNJ, residual_CNJ = np.split(y_FNJ, 2)
        return np.concatenate([level_CNJ, np.where(np.isnan(residual_CNJ), np.nan, 0.0)])

    return mock.patch.object(features, "of_tick", of_tick)


def _without_networks() -> Any:
    def of_tick(cfg: Any, vae: Any, range_3C: np.ndarray, values_CNT: Any) -> Any:
        values_CNT = np.asarray(values_CNT)
        C, N, T = values_CNT.shape
        x_CNT = features.scaled(values_CNT, *np.asarray(range_3C)[:, :, None, None])
        x_CNJW = np.asarray(x_CNT).reshape(C, N, T // WINDOW, WINDOW)
        seen = np.isfinite(x_CNJW).sum(3)
        mean = np.nansum(x_CNJW, 3) / np.maximum(seen, 1)
        y = np.concatenate([mean, np.zeros_like(mean)])
        measured = np.concatenate([seen, seen]) >= features.SEEN
        return np.where(measured, y, np.nan).astype(np.float32)

    return mock.patch.object(features, "of_tick", of_tick)


def _without_past() -> Any:
    original = tracker.advance

    def advance(prior: Any, tracks: Any, y_FNJ: Any, held_N: Any, *more: Any) -> Any:
        return original(prior, tracks, y_FNJ, np.ones_like(held_N), *more)

    return mock.patch.object(tracker, "advance", advance)


VARIANTS = {
    "no-residual": Variant("without the residual of the networks", (_without_residual,)),
    "no-vae": Variant("without networks: means of windows", (_without_networks,)),
    "no-past": Variant("without the machine's own past", (_without_past,)),
    "short": Variant("without continuity: two ticks of 24 s", settings=Settings(continuity_s=48.0)),
    "no-groups": Variant("without grouping of followers", settings=Settings(group_s=1.0)),
    "three-metrics": Variant("three of Minder's seven metrics", metrics=MINDER[:3]),
    "seven-metrics": Variant(
        "Minder's seven metrics, without clock and temperature", metrics=MINDER
    ),
    "all-metrics": Variant("all 21 metrics", metrics=tuple(METRICS)),
}


@contextlib.contextmanager
def changed(variant: Variant, base: Path, fits: bool) -> Iterator[None]:
    """Leaves out the part of a variant while the context lasts. fits: whether a detector is fitted
    in it."""
    with contextlib.ExitStack() as stack:
        for patch in variant.patches:
            stack.enter_context(patch())
        if fits and variant.metrics == WATCHED:
            profile = Detector.load(base).profile
            error = profile.report.get("mean_square", float("nan"))
            same = mock.patch.object(features, "train", lambda *a, **k: (profile.vae, error))
            stack.enter_context(same)
        yield


def read_ablated(name: str, case: Case) -> Grid:
    """Returns the samples of a case, of the metrics that the variant looks at."""
    fleet = dataclasses.replace(case.fleet, metrics=VARIANTS[name].metrics)
    return fleet.read(case.start, case.end)


def fit_ablated(name: str, base: Path, sources: Sequence[Case], steps: int, path: Path) -> None:
    """Fits a variant and saves it. base: the file of the whole detector."""
    variant = VARIANTS[name]
    grids = [read_ablated(name, case) for case in sources]
    with changed(variant, base, True):
        detector = Detector.fit(
            grids, seed=0, steps=steps, settings=variant.settings, metrics=variant.metrics
        )
    detector.save(path)


def ablated_alerts(name: str, path: Path, case: Case) -> list[Said]:
    """Returns the alerts of a new detector on a case."""
    with changed(VARIANTS[name], path, False):
        return our_alerts(path, read_ablated(name, case), case.fleet.departures)
