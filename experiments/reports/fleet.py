"""How hard the simulated fleet is (megajax/monitor/fleet): signals, an oracle, two plain detectors.

    uv run experiments/reports/fleet.py --cases=150 --split=held_out

A simulator that a plain threshold solves says nothing about a detector, and neither does one whose
faults cannot be seen. Three things are reported: the distribution of signal to noise; how often an
oracle that knows everything but the machine and the noise names the machine; and two detectors
without a model, one of which has no continuity (Minder section 4.4).

Legend: C metrics, N machines, T seconds, W windows of 8 s or of means, S seconds of a window.
"""

import megajax.core.interrupted  # noqa: F401, I001  (first: Ctrl-C during the imports)

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from megajax.monitor.fleet import METRICS, MIXES, Case, Fleet, cases
from megajax.monitor.samples import Grid
from megajax.monitor.sources.convert import WATCHED

WINDOW = 8  # seconds, the paper's
PLAIN = (2.0, 3.0, 4.0, 6.0)  # thresholds that are tried; the best one is reported

FLAGS = flags.FLAGS


def deviations(grid: Grid) -> np.ndarray:
    """Returns the samples less the median of the machines, float64 (C, N, T); of packet rates
    their logarithms."""
    value_CNT = grid.values_CNT.astype(np.float64)
    for c, name in enumerate(grid.metrics):
        if METRICS[name].log:
            value_CNT[c] = np.log1p(value_CNT[c])
    return value_CNT - _median(value_CNT, axis=1)


def signal_to_noise(case: Case, grid: Grid) -> float:
    """Returns how far the faulty machine is from the others in the metric that shows it best.

    The unit is the standard deviation, estimated from the median, of 8 s means of all other
    machines in the last 4 minutes of the fault. A detector that compares machines and knows no past
    sees this. Infinity: the machine's series end.
    """
    fault, best = case.faults[0], 0.0
    time_T = np.arange(grid.start, grid.end)
    end = min(fault.end, case.end) - 2
    inside_T = (time_T >= max(fault.start + 30, end - 240)) & (time_T < end)
    victim = grid.machines.index(fault.machine)
    for name, value_NT in zip(grid.metrics, deviations(grid)[:, :, inside_T], strict=True):
        if not {name, "*"} & set(fault.metrics):
            continue
        if np.isnan(value_NT[victim]).mean() > 0.7:
            return float("inf")
        mean_NW = _means(value_NT, WINDOW)
        others = np.delete(mean_NW, victim, axis=0)
        spread = 1.4826 * np.nanmedian(np.abs(others - np.nanmedian(others))) + 1e-9
        best = max(best, float(abs(np.nanmedian(mean_NW[victim])) / spread))
    return best


def oracle(case: Case, grid: Grid) -> bool:
    """Returns whether the likeliest machine is a faulty one, given everything but the machine and
    the noise.

    The oracle knows roles, clocks, what happened to the whole job, the fault's signature and its
    onset, and takes each machine's own level from before the onset. It treats the noise of means of
    20 s as independent.
    """
    fault, fleet = case.faults[0], case.fleet
    time_T = np.arange(grid.start, grid.end)
    during_T = (time_T >= fault.start + 2) & (time_T < min(fault.end, case.end) - 2)
    before_T = time_T < fault.start - 3
    expected_CNT = _expected(case).values_CNT.astype(np.float64)
    score_N = np.zeros(fleet.machines)
    for c, name in enumerate(grid.metrics):
        spec = METRICS[name]
        moves = [m for m in fault.moves if m.metric in (name, "*")]
        if not moves:
            continue
        seen_NT, clear_NT = grid.values_CNT[c].astype(np.float64), expected_CNT[c]
        if moves[-1].target == "gone":
            score_N += 1000 * (np.isnan(seen_NT[:, during_T]).mean(axis=1) > 0.8)
            continue
        if spec.log:
            seen_NT, clear_NT = np.log1p(seen_NT), np.log1p(clear_NT)
        left_NT = seen_NT - clear_NT
        left_NT -= _median(left_NT, axis=0)
        own_N1 = _median(_means(left_NT[:, before_T], 20), axis=1)  # whatever a jitter did
        # One machine of a thousand was disturbed for most of that time: its own level is not that.
        usual = 4 * 1.4826 * np.nanmedian(np.abs(own_N1))
        left_NT = np.nan_to_num(left_NT - np.clip(own_N1, -usual, usual))
        shift_NT = np.zeros_like(clear_NT)
        for move in moves:
            way_T = move.weight((time_T - fault.start)[None])[0]
            shift_NT += way_T * (move.level(spec) - (clear_NT + shift_NT))
        left_NW, shift_NW = _means(left_NT[:, during_T], 20), _means(shift_NT[:, during_T], 20)
        spread = 1.4826 * np.median(np.abs(left_NW - np.median(left_NW))) + 0.004 * spec.span
        limit_NW = 8 * spread + np.abs(shift_NW)  # a jitter is not followed further
        left_NW = np.clip(left_NW, -limit_NW, limit_NW)
        score_N += (left_NW * shift_NW - shift_NW**2 / 2).sum(axis=1) / spread**2
    named = grid.machines[int(score_N.argmax())]
    return named in {f.machine for f in case.faults}


def _expected(case: Case) -> Grid:
    """Returns what the machines would show without noise and without their own disturbances."""
    fleet = case.fleet
    job = [
        replace(d, moves=())
        for d in fleet.disturbances(case.start - 60, case.end + 60)
        if d.changes_the_job and d.kind not in ("checkpoint", "evaluation")
    ]
    setting = replace(
        fleet.setting,
        noise=0,
        missing=0,
        gaps=0,
        jitters=0,
        job_events=0,
        daily=0,
        other_make=0,
        stages=fleet.layout.stages,
        tensor=fleet.layout.tensor,
    )
    calm = Fleet(fleet.machines, fleet.seed, fleet.metrics, setting, (), tuple(job), fleet.start)
    return calm.read(case.start, case.end)


def plain(grid: Grid, threshold: float, continuity_s: int, by: str) -> str | None:
    """Returns the machine that a detector without a model names, or None.

    Every 4 s it takes, in each metric, the machine that is furthest from the others in the mean of
    8 s. It names a machine that was the furthest for `continuity_s`, with a score above the
    threshold. by: "z": distance from the mean in standard deviations; "mad": distance from the
    median in medians.
    """
    named: list[tuple[int, int]] = []
    for name, value_NT in zip(grid.metrics, deviations(grid), strict=True):
        mean_NW = np.nan_to_num(_means(value_NT, 4))
        mean_NW = (mean_NW[:, 1:] + mean_NW[:, :-1]) / 2
        far_NW = np.abs(mean_NW)
        if by == "z":
            score_NW = (far_NW - far_NW.mean(axis=0)) / (far_NW.std(axis=0) + 1e-9)
        else:
            spread_W = 1.4826 * np.median(far_NW, axis=0) + 0.02 * METRICS[name].span
            score_NW = far_NW / spread_W
        run, last = 0, -1
        for w, k in enumerate(score_NW.argmax(axis=0)):
            over = score_NW[k, w] > threshold
            run = (run + 1 if k == last else 1) if over else 0
            last = int(k) if over else -1
            if run * 4 >= max(continuity_s, 1):
                named.append((w, int(k)))
                break
    return grid.machines[min(named)[1]] if named else None


def quality(answers: Sequence[tuple[Case, str | None]]) -> dict[str, float]:
    """Returns precision, recall and F1; an alert for another machine is a false one and a miss."""
    true = {id(c): {f.machine for f in c.faults} for c, _ in answers}
    right = sum(name in true[id(c)] for c, name in answers if name)
    alerts = sum(name is not None for _, name in answers)
    faulty = sum(bool(c.faults) for c, _ in answers)
    precision, recall = right / max(alerts, 1), right / max(faulty, 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-9)
    return {"precision": round(precision, 3), "recall": round(recall, 3), "f1": round(f1, 3)}


def difficulty(made: Sequence[tuple[Case, Grid]]) -> dict[str, Any]:
    """Returns the figures of a set of cases: signals, the oracle, and detectors without a model."""
    faulty = [(c, g) for c, g in made if c.faults]
    ratio = np.array([signal_to_noise(c, g) for c, g in faulty])
    placed = [oracle(c, g) for c, g in faulty]
    tried = {
        (by, seconds): [quality([(c, plain(g, t, seconds, by)) for c, g in made]) for t in PLAIN]
        for by, seconds in (("z", 0), ("mad", 0), ("mad", 240))
    }
    best = {key: max(qualities, key=lambda q: q["f1"]) for key, qualities in tried.items()}
    quantiles = (1, 5, 10, 25, 50, 75)
    finite = np.minimum(ratio, 1e6)
    return {
        "cases": len(made),
        "faulty": len(faulty),
        "signal_to_noise_percentiles": {
            str(q): round(float(v), 2)
            for q, v in zip(quantiles, np.percentile(finite, quantiles), strict=True)
        },
        "signal_below": {str(x): round(float(np.mean(ratio < x)), 3) for x in (1, 2, 4, 8)},
        "series_that_end": round(float(np.mean(np.isinf(ratio))), 3),
        "oracle": round(float(np.mean(placed)), 4),
        "largest_z_score": best["z", 0],
        "median_score": best["mad", 0],
        "median_score_240s": best["mad", 240],
    }


def draw(case: Case, path: Path) -> None:
    """Writes a heat map of all metrics of a case, with the machine and time of its faults."""
    from experiments.reports.reporting import panels, save

    grid = case.read()
    names = [n for n in WATCHED if n in grid.metrics] or list(grid.metrics)
    figure, axes = panels(1, len(names), size=(9, 1.3 * len(names)), sharex=True)
    for panel, name in zip(axes, names, strict=True):
        value_NT = grid.values_CNT[grid.metrics.index(name)]
        shown_NT = np.log1p(value_NT) if METRICS[name].log else value_NT
        low, high = np.nanpercentile(shown_NT, (1, 99.5))
        panel.imshow(shown_NT, aspect="auto", interpolation="nearest", vmin=low, vmax=high)
        panel.set_ylabel("machine")
        panel.set_title(f"{name} ({'log of ' if METRICS[name].log else ''}{METRICS[name].unit})")
        for fault in case.faults:
            panel.axvline(fault.start - case.start, color="red", linewidth=0.8)
            panel.plot(-4, grid.machines.index(fault.machine), ">", color="red", clip_on=False)
    axes[-1].set_xlabel("seconds; white: no sample; red: onset of the fault and its machine")
    what = " and ".join(f"{f.kind} on {f.machine}" for f in case.faults) or "no fault"
    save(figure, path, f"{case.fleet.machines} simulated machines: {what}")


def _means(value_NT: np.ndarray, seconds: int) -> np.ndarray:
    """Returns the means of intervals of `seconds`; NaN where an interval has no sample."""
    used = value_NT.shape[1] // seconds * seconds
    parts_NWS = value_NT[:, :used].reshape(len(value_NT), -1, seconds)
    there_NWS = np.isfinite(parts_NWS)
    count_NW = there_NWS.sum(axis=2)
    total_NW = np.where(there_NWS, parts_NWS, 0).sum(axis=2)
    return np.where(count_NW, total_NW / np.maximum(count_NW, 1), np.nan)


def _median(value: np.ndarray, axis: int) -> np.ndarray:
    """Returns the median of the finite values along an axis; 0 where there is none."""
    nothing = ~np.isfinite(value).any(axis=axis, keepdims=True)
    return np.nanmedian(np.where(nothing, 0, value), axis=axis, keepdims=True)


def main(_: Any) -> None:
    """Makes the cases, one size after the other, and prints a row of JSON for each."""
    figures = {}
    for size in map(int, FLAGS.machines):
        drawn = cases(
            FLAGS.cases, size, FLAGS.seed, mix=FLAGS.mix, split=FLAGS.split, noise=FLAGS.noise
        )
        figures[size] = difficulty([(case, case.read()) for case in drawn])
        print(json.dumps({"machines": size, "split": FLAGS.split} | figures[size]), flush=True)
    if FLAGS.figure:
        drawn = cases(100, int(FLAGS.machines[-1]), FLAGS.seed, mix=FLAGS.mix, split=FLAGS.split)
        draw(next(c for c in drawn if c.faults), Path(FLAGS.figure))


if __name__ == "__main__":
    flags.DEFINE_integer("cases", 100, "Cases of each size.", 1)
    flags.DEFINE_list("machines", ["4", "16", "64"], "Numbers of machines.")
    flags.DEFINE_integer("seed", 0, "Seed of the cases.")
    flags.DEFINE_enum("split", "train", ["train", "validate", "held_out"], "Family of the jobs.")
    flags.DEFINE_enum("mix", "evaluation", sorted(MIXES), "Shares of the fault types.")
    flags.DEFINE_enum("noise", None, ["low", "middle", "high"], "Level of noise; default: all.")
    flags.DEFINE_string("figure", "", "Write a heat map of one faulty case to this path.")
    app.run(main)
