"""Trains the LSTM-VAEs of all metrics in one program, with the library's train step.

Legend: B windows, W seconds, C metrics.
"""

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.models import lstm_vae
from megajax.models.lstm_vae import HOLE, LstmVaeConfig
from megajax.training import (
    JobConfig,
    OptimConfig,
    Task,
    TrainConfig,
    TrainState,
    make_train_step,
)  # fmt: skip
from megajax.training.task import Leaf

BATCH = 512  # windows of a step
TELL = 200  # steps between two lines of progress
MOVED = 0.5  # share of the windows that are moved, so that levels outside the range come back too


@dataclasses.dataclass(frozen=True)
class Keep:
    """Folder in which a training is saved, every so many steps. folder: None: it is not saved."""

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
    train_cfg = TrainConfig(steps=steps, global_batch=BATCH, seq_len=cfg.window, seed=seed % 2**32,
                            dtype="float32", remat="none")  # fmt: skip
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
