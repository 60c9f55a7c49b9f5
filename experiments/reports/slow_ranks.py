"""How often the slow rank of a job is named from its steps' times (megajax/monitor/slow_rank.py).

    uv run experiments/reports/slow_ranks.py --runs=100 --machines=4,16,64,256,1024

Jobs are simulated, an hour each, two seconds a step. What is assumed, none of it measured on a real
cluster: compute 60 to 85 % of a step; pipeline stages differ by 10 %, machines by 1 %; noise of
each step 1, 3 or 8 %, half of it with a memory; drifts of 1 %; every machine is disturbed now and
then for 5 to 200 s, by 10 to 100 %; checkpoints and evaluations stop all; the network of all is
slower for minutes, or the file system of all; a checkpoint is written beside the steps and takes
processors of some ranks. A fault makes the steps 8 to 60 % longer until the end: a device that is
slow, a host whose own work is, or a processor that others use.

Legend: R ranks (one a machine), T steps, K ticks.
"""

import megajax.core.interrupted  # noqa: F401, I001  (first: Ctrl-C during the imports)

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from experiments.reports.reporting import wilson
from megajax.monitor.slow_rank import TICKS, OwnWork, Slow

FLAGS = flags.FLAGS
STEP_S, STEPS = 2.0, 1800
KINDS = ("device", "host", "processor")
PULSE_EVERY = 10  # steps


@dataclass(frozen=True)
class Run:
    """One job.

    step_T: seconds of each step. work_MRT: the measures own, demand and pulse of each rank and
    step; NaN: not measured. who: the rank that is slow from step `onset` on; None: all are healthy.
    kind: kind of the fault.
    """

    step_T: np.ndarray
    work_MRT: np.ndarray
    who: int | None
    onset: int
    kind: str


def simulate(ranks: int, seed: int, healthy: float = 0.3) -> Run:
    """Returns a job of so many ranks. healthy: share of the jobs without a fault."""
    random = np.random.default_rng([ranks, seed])
    share = random.uniform(0.6, 0.85)
    stages = int(random.choice([s for s in (1, 2, 4, 8) if s <= ranks]))
    stage_R = np.arange(ranks) * stages // ranks
    compute_RT = STEP_S * share * _relative(random, stage_R)
    host_RT = STEP_S * random.uniform(0.01, 0.05) * _host(random, stage_R)
    other_RT = np.zeros_like(host_RT)  # processor time beside the steps
    comm_T = STEP_S * (1 - share) * np.exp(random.normal(0, 0.02, STEPS))
    _disturb(random, compute_RT, host_RT)
    _happens_to_all(random, host_RT, comm_T)
    _writes_checkpoints(random, other_RT)
    who, onset, kind = None, 0, ""
    starved_RT = np.zeros_like(host_RT)
    if random.random() >= healthy:
        who, onset = int(random.integers(ranks)), int(random.integers(600, 1200))
        kind = KINDS[random.integers(3)]
        _slow(random, kind, who, onset, compute_RT, host_RT, starved_RT)
    step_T = (compute_RT + host_RT).max(0) + comm_T
    _stops_all(random, step_T)
    demand_RT = host_RT * 1.5 + other_RT + starved_RT
    pulse_RT = compute_RT / np.median(compute_RT, axis=1, keepdims=True) * STEP_S
    observed = [
        x * np.exp(random.normal(0, s, x.shape))
        for x, s in ((host_RT, 0.02), (demand_RT, 0.1), (pulse_RT, 0.02))
    ]
    observed[2][:, np.arange(STEPS) % PULSE_EVERY != 0] = np.nan
    return Run(step_T, np.stack(observed), who, onset, kind)


def _relative(random: np.random.Generator, stage_R: np.ndarray) -> np.ndarray:
    """Returns the duration of the computation of each rank in each step, around 1."""
    R, stages = len(stage_R), int(stage_R.max()) + 1
    level_R = 1 + random.normal(0, 0.1, stages)[stage_R] * (stages > 1) + random.normal(0, 0.01, R)
    sigma = random.choice([0.01, 0.03, 0.08])
    fast_RT = random.normal(0, sigma / math.sqrt(2), (R, STEPS))
    slow_RT = np.zeros((R, STEPS))
    steps_RT = random.normal(0, sigma / math.sqrt(2) * math.sqrt(1 - 0.7**2), (R, STEPS))
    for t in range(1, STEPS):
        slow_RT[:, t] = 0.7 * slow_RT[:, t - 1] + steps_RT[:, t]
    t_T = np.arange(STEPS) * STEP_S
    drift_T = 0.01 * np.sin(2 * np.pi * (t_T / random.uniform(1200, 3600) + random.random()))
    phase_R = random.random(R)[:, None]
    own_RT = 0.005 * np.sin(2 * np.pi * (t_T / random.uniform(1200, 3600) + phase_R))
    return level_R[:, None] * np.exp(fast_RT + slow_RT + drift_T + own_RT)


def _host(random: np.random.Generator, stage_R: np.ndarray) -> np.ndarray:
    """Returns the same for data and preparation: only the first and the last stage read data."""
    reads_R = np.where((stage_R == 0) | (stage_R == stage_R.max()), 1.0, 0.2)
    return reads_R[:, None] * np.exp(random.normal(0, 0.3, (len(stage_R), STEPS)))


def _disturb(random: np.random.Generator, compute_RT: np.ndarray, host_RT: np.ndarray) -> None:
    """Makes single ranks slower for 5 to 200 s; each is disturbed about once in six hours."""
    for _ in range(random.poisson(1.5 + compute_RT.shape[0] / 6)):
        r, t = random.integers(compute_RT.shape[0]), random.integers(STEPS)
        span = slice(t, t + int(random.uniform(5, 200) / STEP_S))
        factor = 1 + random.uniform(0.1, 1.0)
        (compute_RT if random.random() < 0.5 else host_RT)[r, span] *= factor


def _happens_to_all(random: np.random.Generator, host_RT: np.ndarray, comm_T: np.ndarray) -> None:
    """Makes the network, or the file system, of all ranks slow for minutes."""
    for _ in range(random.poisson(1.0)):
        t = random.integers(STEPS)
        comm_T[t : t + random.integers(150, 600)] *= 1 + random.uniform(0.3, 1.5)
    for _ in range(random.poisson(1.0)):
        t = random.integers(STEPS)
        each_R1 = 1 + random.uniform(1, 6) * np.exp(random.normal(0, 0.2, (host_RT.shape[0], 1)))
        host_RT[:, t : t + random.integers(150, 600)] *= each_R1


def _writes_checkpoints(random: np.random.Generator, other_RT: np.ndarray) -> None:
    """Lets some ranks write checkpoints while the steps go on."""
    every, writers = random.integers(150, 600), max(1, other_RT.shape[0] // 8)
    for t in range(int(every), STEPS, int(every)):
        length = int(random.uniform(10, 150) / STEP_S)
        other_RT[:writers, t : t + length] += random.uniform(0.2, 2.0) * STEP_S


def _stops_all(random: np.random.Generator, step_T: np.ndarray) -> None:
    """Makes single steps longer, as saves and evaluations do."""
    for least, most in ((3.0, 60.0), (30.0, 300.0)):
        every = int(random.integers(150, 900))
        for t in range(every, STEPS, every):
            step_T[t] += random.uniform(least, most)


def _slow(
    random: np.random.Generator,
    kind: str,
    who: int,
    onset: int,
    compute_RT: np.ndarray,
    host_RT: np.ndarray,
    starved_RT: np.ndarray,
) -> None:
    """Makes one rank so slow that the steps take 8 to 60 % longer."""
    total_RT = compute_RT + host_RT
    longest = float(np.median(total_RT.max(0)))
    more = longest - float(np.median(total_RT[who])) + random.uniform(0.08, 0.6) * STEP_S
    if kind == "device":
        compute_RT[who, onset:] *= 1 + more / float(np.median(compute_RT[who]))
        return
    noise_T = np.exp(random.normal(0, 0.2, STEPS - onset))
    if kind == "host":
        host_RT[who, onset:] += more * noise_T
    else:  # the launches are late, and its threads wait
        host_RT[who, onset:] += random.uniform(0.3, 1.0) * more * noise_T
        compute_RT[who, onset:] += more
        starved_RT[who, onset:] += more * noise_T


def judge(run: Run, tick_steps: int = 12) -> list[tuple[int, Slow]]:
    """Returns a (step, finding) for each named rank. tick_steps: steps of a tick of 24 s."""
    ranks = run.work_MRT.shape[1]
    work, findings = OwnWork(ranks, TICKS), []
    for t in range(0, STEPS - tick_steps + 1, tick_steps):
        span = slice(t, t + tick_steps)
        part_MRT = run.work_MRT[:, :, span]
        middle = [np.median(part_MRT[0], -1), part_MRT[1].mean(-1), _middle(part_MRT[2])]
        at = t * STEP_S
        step_s = float(np.median(run.step_T[span]))
        findings += [(t + tick_steps, s) for s in work.tick(at, step_s, np.stack(middle))]
    return findings


def _middle(x_RT: np.ndarray) -> np.ndarray:
    has_T = np.isfinite(x_RT).any(0)
    return np.median(x_RT[:, has_T], -1) if has_T.any() else np.full(len(x_RT), np.nan)


# ---- figures


def counts(ranks: int, runs: int, seed: int) -> dict[str, Any]:
    """Returns counts over simulated jobs: faults, localised ones, false alarms, by kind."""
    outcomes: Counter[str] = Counter()
    delays_s: list[float] = []
    for k in range(runs):
        run = simulate(ranks, seed + k)
        alarms = judge(run)
        if run.who is None:
            outcomes["healthy"] += 1
            outcomes["false_alarms"] += len(alarms)
            continue
        outcomes["faults"] += 1
        outcomes[f"faults_{run.kind}"] += 1
        after = [(at, one) for at, one in alarms if at > run.onset]
        outcomes["false_alarms"] += len(alarms) - len(after)
        if not after:
            outcomes["missed"] += 1
        elif after[0][1].rank != run.who:
            outcomes["wrong"] += 1
        else:
            outcomes["localised"] += 1
            outcomes[f"localised_{run.kind}"] += 1
            delays_s.append((after[0][0] - run.onset) * STEP_S)
    low, high = wilson(outcomes["localised"], outcomes["faults"])
    hours = runs * STEPS * STEP_S / 3600
    return {
        "machines": ranks,
        "jobs": runs,
        **outcomes,
        "localised_share": outcomes["localised"] / max(outcomes["faults"], 1),
        "interval_95": [low, high],
        "delay_median_s": float(np.median(delays_s)) if delays_s else None,
        "false_alarms_per_day": 24 * outcomes["false_alarms"] / hours,
    }


def main(_: Sequence[str]) -> None:
    """Prints a row for each number of machines; with --out writes them."""
    rows = []
    for ranks in map(int, FLAGS.machines):
        rows.append(counts(ranks, FLAGS.runs, FLAGS.seed))
        print(json.dumps(rows[-1]), flush=True)
    total = {n: sum(r.get(n, 0) for r in rows) for n in ("faults", "localised", "wrong", "missed")}
    low, high = wilson(total["localised"], total["faults"])
    share = total["localised"] / max(total["faults"], 1)
    print(f"localised {share:.3f} of {total['faults']} faults [{low:.3f}, {high:.3f}]")
    if FLAGS.out:
        text = json.dumps({"seed": FLAGS.seed, "rows": rows, "total": total}, indent=1)
        Path(FLAGS.out).write_text(text + "\n")


if __name__ == "__main__":
    flags.DEFINE_integer("runs", 20, "jobs a number of machines", lower_bound=1)
    flags.DEFINE_integer("seed", 1, "of the first job", lower_bound=0)
    flags.DEFINE_list("machines", ["4", "16", "64"], "of a job")
    flags.DEFINE_string("out", None, "JSON file to write")
    app.run(main)
