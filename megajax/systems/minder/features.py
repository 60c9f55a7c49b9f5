"""Turns seconds of metrics into two channels a metric: the level and the residual of each window.

It also trains the networks that do this, and finds readings at the end of a metric's scale.

Each window of 8 s goes through the LSTM-VAE of its metric (Minder section 4.2). The level is the
mean of the reconstruction, which has no noise. The residual is the logarithm of the distance
between window and reconstruction; it changes if a series freezes, oscillates or leaves its range.

Legend: C metrics, N machines, T seconds of a tick, J windows of a tick, F channels (2 C: levels,
then residuals).
"""

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.models import lstm_vae
from megajax.models.lstm_vae import HOLE, LstmVaeConfig
from megajax.systems.minder.settings import WINDOW
from megajax.training import (
    JobConfig,
    OptimConfig,
    Task,
    TrainConfig,
    TrainState,
    make_train_step,
)
from megajax.training.task import Leaf

Array = jax.Array
SEEN = WINDOW // 2  # seconds of a window that must have a sample
MACHINES = 192  # (chosen) of a call
FLOOR = 1e-3  # (chosen) of a residual, as a share of three healthy ranges


def scaled(values: Any, low: Any, high: Any, bend: Any) -> Any:
    """Returns values scaled so that the healthy range is the middle third of [0, 1], then clipped.

    NaN stays NaN. low, high: ends of the healthy range, after `bent`. bend: as in `bent`. All
    arguments are NumPy or JAX arrays of shapes that broadcast.
    """
    library = jnp if isinstance(values, jax.Array) else np
    values = bent(values, bend)
    return library.clip((values - low) / (3.0 * (high - low)) + 1.0 / 3.0, 0.0, 1.0)


def bent(values: Any, bend: Any) -> Any:
    """Returns asinh(values / bend), which is logarithmic far above `bend`; values if bend is 0.

    It is for rates of rare events, whose healthy values differ by factors.
    """
    library = jnp if isinstance(values, jax.Array) else np
    divisor = library.where(bend > 0, bend, 1.0)
    return library.where(bend > 0, library.arcsinh(values / divisor), values)


@functools.partial(jax.jit, static_argnums=0)
def _of_machines(cfg: LstmVaeConfig, vae: Tree, range_3C: Array, values_CNT: Array) -> Array:
    """Returns y_FNJ of MACHINES machines; values are as measured, NaN where a sample is missing."""
    C, N, T = values_CNT.shape
    values_BWC = values_CNT.reshape(C, -1, WINDOW).transpose(1, 2, 0)
    x_BWC = scaled(values_BWC, *range_3C[:, None, None])
    back_BWC = lstm_vae.denoise(cfg, vae, x_BWC)
    measured_BWC = x_BWC >= 0
    seen_BC = measured_BWC.astype(jnp.float32).sum(1)
    error_BWC = jnp.where(measured_BWC, x_BWC - back_BWC, 0.0)
    mean_square_BC = (error_BWC**2).sum(1) / jnp.maximum(seen_BC, 1.0)
    residual_BC = jnp.log(FLOOR + jnp.sqrt(mean_square_BC))
    y_BF = jnp.concatenate([back_BWC.mean(1), residual_BC], 1)
    y_BF = jnp.where(jnp.concatenate([seen_BC, seen_BC], 1) >= SEEN, y_BF, jnp.nan)
    return y_BF.T.reshape(-1, N, T // WINDOW)


def of_tick(
    cfg: LstmVaeConfig, vae: Tree, range_3C: np.ndarray, values_CNT: np.ndarray
) -> np.ndarray:
    """Returns y_FNJ, float32: level and residual of each window of one tick.

    A window has NaN if fewer than half of its seconds have a sample. Jobs of all sizes run the same
    program, MACHINES at a time.
    Args: range_3C: low, high and bend of each metric (`scaled`). values_CNT: seconds as measured,
      NaN where a sample is missing.
    """
    N = values_CNT.shape[1]
    range_3C = np.asarray(range_3C, np.float32)
    batches = []
    for start in range(0, N, MACHINES):
        part = values_CNT[:, start : start + MACHINES]
        pad = ((0, 0), (0, MACHINES - part.shape[1]), (0, 0))
        part = np.pad(part, pad, constant_values=np.nan)
        batches.append(_of_machines(cfg, vae, range_3C, part))
    y_FNJ = np.concatenate([np.asarray(part) for part in batches], 1)  # all run before the first
    return y_FNJ[:, :N]


# ---- trains the LSTM-VAEs of all metrics in one program, with the library's train step
#
# Legend: B windows, W seconds, C metrics.


BATCH = 512  # windows of a step
TELL = 200  # steps between two lines of progress
MOVED = 0.5  # share of the windows that are moved, so that levels outside the range come back too


@dataclasses.dataclass(frozen=True)
class Keep:
    """The folder that a training is saved in; None: it is not saved. every: steps between saves."""

    folder: str | Path | None = None
    every: int = 100


def train(
    cfg: LstmVaeConfig, x_BWC: np.ndarray, seed: int, steps: int, keep: Keep, tell: Any
) -> tuple[Tree, float]:
    """Returns (parameters, mean squared error of a sample over the last 20 batches).

    Args: x_BWC: windows, scaled to [0, 1], NaN for missing samples. keep: where to save; the same
      call resumes from there. tell: called with lines of progress.
    """
    devices = MeshSpec(data=1).build(jax.devices()[:1])
    train_cfg = TrainConfig(
        steps=steps,
        global_batch=BATCH,
        seq_len=cfg.window,
        seed=seed % 2**32,
        dtype="float32",
        remat="none",
    )
    optim = OptimConfig(lr=1e-2, weight_decay=0.0, warmup=20, final=0.02)
    job = JobConfig(model=cfg, train=train_cfg, optim=optim)
    batch = {"targets": Leaf((cfg.window, cfg.metrics), (None, None), "float32")}
    task = Task(functools.partial(lstm_vae.parts, cfg), batch, lstm_vae.objective, unit="windows")
    step = make_train_step(job, devices, task)
    state, done, checkpoints = _begin(step, seed, steps, keep.folder)
    where = step.abstract_batch["targets"].sharding
    recent: list[float] = []
    for number in range(done, steps):
        rows = _rows(x_BWC, seed, number)
        state, metrics = step.step(state, {"targets": jax.device_put(rows, where)})
        if number >= steps - 20:
            recent.append(float(metrics["squared_error"]))
        done, last = number + 1, number + 1 == steps
        if checkpoints is not None and (done % keep.every == 0 or last):
            checkpoints.save(done, state, order=step.rows)
        if done % min(TELL, keep.every) == 0 or last:
            tell(f"step {done}/{steps} | squared error {float(metrics['squared_error']):.2e}")
    if checkpoints is not None:
        checkpoints.close()
    params = jax.tree.map(np.asarray, state.params)
    return params, float(np.mean(recent)) if recent else float("nan")


def _begin(step: Any, seed: int, steps: int, folder: Any) -> tuple[TrainState, int, Any]:
    """Returns (the state to go on with, steps done, where to save)."""
    if folder is None:
        return step.init(seed % 2**32), 0, None
    from megajax.checkpoint import CheckpointManager

    checkpoints = CheckpointManager(str(Path(folder)))
    done = checkpoints.latest()
    if done is None or done > steps:
        return step.init(seed % 2**32), 0, checkpoints
    like = {n: x for n, x in vars(step.abstract_state).items() if x is not None}
    return TrainState(**checkpoints.restore(like=like, order=step.rows)), done, checkpoints


def variance(x_BWC: np.ndarray, seed: int) -> float:
    """Returns the variance of a sample over training windows.

    It is the error of a network whose reconstruction is always the mean.
    """
    rows_BWC = np.concatenate([_rows(x_BWC, seed, number) for number in range(8)])
    measured = np.where(rows_BWC >= 0, rows_BWC, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a metric without a sample
        each_C = np.nanvar(measured, (0, 1))
    return float(max(np.nanmean(each_C), 1e-12))


def _rows(x_BWC: np.ndarray, seed: int, number: int) -> np.ndarray:
    """Returns the windows of a step, a pure function of (seed, step)."""
    rng = np.random.default_rng([seed % 2**32, number])
    rows = x_BWC[rng.integers(0, len(x_BWC), BATCH)]
    by = rng.uniform(-1 / 3, 1 / 3, (BATCH, 1, rows.shape[2])) * (
        rng.random((BATCH, 1, rows.shape[2])) < MOVED
    )
    moved = np.clip(rows + by, 0, 1)
    return np.where(np.isfinite(moved), moved, HOLE).astype(np.float32)


# ---- machines whose metric usually stands at the end of its scale
#
# A reading at the end of its scale says "at least", not how much: a duty cycle of 100 % hides by
# how much a machine is above its peers. When the job slows and the peers fall to 93 %, the machine
# stays above them, which is no change of the machine. Such a difference is left out of its score.
#
# Legend: C metrics, N machines, T seconds of a tick.


SHARE = 0.01  # (chosen) of a metric's samples that have its highest value, or its lowest
SLOWLY = 0.25  # (chosen) share by which a tick changes what is usual
ALIKE = 1e-5  # of a value: as far apart are readings that are equal


def ends(values: np.ndarray) -> tuple[float, float]:
    """Returns (low, high) ends of the scale of a metric's values; -inf or inf: it has none."""
    low, high = float(values.min()), float(values.max())
    if low == high:  # what has never changed shows no end
        return -np.inf, np.inf
    at_low, at_high = (values == low).mean(), (values == high).mean()
    return (low if at_low > SHARE else -np.inf), (high if at_high > SHARE else np.inf)


class Edges:
    """Remembers which machines have usually been at an end of a metric's scale."""

    def __init__(self, low_C: np.ndarray, high_C: np.ndarray):
        """low_C, high_C: ends of the scales, as `ends` returns them."""
        self._end_2C = np.stack([low_C, high_C]).astype(np.float32)
        self._usual_2CN = np.full((2, len(low_C), 0), np.nan, np.float32)

    def forget(self, rows: list[int]) -> None:
        """Removes the machines in these rows."""
        self._usual_2CN = np.delete(self._usual_2CN, rows, axis=2)

    def seen(self, values_CNT: np.ndarray, learns_N: np.ndarray) -> np.ndarray:
        """Takes the samples of a tick; returns, (2, C, N), which machines are below or above their
        peers at an end of the scale where they usually stand.

        Args: learns_N: machines that are not suspected.
        """
        N = values_CNT.shape[1]
        more = N - self._usual_2CN.shape[2]
        self._usual_2CN = np.pad(
            self._usual_2CN, ((0, 0), (0, 0), (0, more)), constant_values=np.nan
        )
        measured_CNT = np.isfinite(values_CNT)
        count_CN = measured_CNT.sum(2)
        share_2CN = np.full(self._usual_2CN.shape, np.nan, np.float32)
        inside_2CN = np.zeros(share_2CN.shape, bool)
        for k, sign in enumerate((-1, 1)):
            for c in np.flatnonzero(np.isfinite(self._end_2C[k])):
                end = self._end_2C[k, c]
                beyond_NT = sign * (values_CNT[c] - end)
                near = ALIKE * max(abs(end), 1.0)
                at_N = (np.abs(beyond_NT) <= near).sum(1)
                share_2CN[k, c] = np.where(
                    count_CN[c] > 0, at_N / np.maximum(count_CN[c], 1), np.nan
                )
                inside_2CN[k, c] = ~(beyond_NT > near).any(1)
        usual = self._usual_2CN
        moved = usual + SLOWLY * (share_2CN - usual)
        new = np.where(np.isfinite(usual), np.where(learns_N, moved, usual), share_2CN)
        self._usual_2CN = np.where(np.isfinite(share_2CN), new, usual)
        return (self._usual_2CN > 0.5) & inside_2CN
