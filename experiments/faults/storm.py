"""A storm over a supervised job: one fault after another, each followed until training goes on.

A fault strikes while the job trains calmly. What must be found is found by the driver, under the
right rule and name; then the job trains again. What must be survived without a restart is followed
for some steps. A fault that the driver reports and nobody made is a false alarm.
"""

import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments.faults.cluster import ROOT, SUPERVISE, Cluster, Tail
from experiments.faults.strikes import KINDS, Deeds, Hit, Strike, strikes
from experiments.reports import reporting
from experiments.reports.reporting import markdown_table, panels, read, save, source
from megajax.core import config, mesh
from megajax.core.errors import UserError
from megajax.monitor import results, timeline
from megajax.monitor.records import read_jsonl

TICK_S = 0.2  # (chosen)
CALM = 25  # (chosen) steps without a fault before the next: a save, and a straggler's window
AFTER = 8  # (chosen) steps after which a fault that needs no restart counts as survived
SWEEP_S = (
    65.0  # after that an agent removes what others left in shared memory (monitor/heartbeat.py)
)


@dataclass
class Case:
    """A fault that struck, and how the job coped with it. Times are seconds since the epoch."""

    strike: Strike
    hit: Hit
    at: float
    step: int
    attempt: int
    detected: float | None = None  # when it was detected
    back: float | None = None  # when a step ended after that
    calmed: float | None = None  # when it was taken back
    rule: str | None = None
    said: str = ""
    right: bool | None = None  # whether the right one was named
    resumed: int | None = None
    alarms: int = 0  # faults reported where none was to be
    again: int = 0  # more faults on the way back

    @property
    def done(self) -> bool:
        """Whether the next fault may strike."""
        return self.back is not None and self.calmed is not None


@dataclass
class Seen:
    """The events and metrics that the job has written so far."""

    events: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


class Storm:
    """Runs the faults of a plan over a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        deeds: Deeds,
        plan: Iterator[Strike],
        limit_s: float,
        say: Any = print,
    ):
        """limit_s: after that a job that does not train again is lost."""
        self._cluster, self._deeds, self._plan = cluster, deeds, plan
        self._limit, self._say = limit_s, say
        self._tails = (
            Tail(cluster.out / "events.jsonl"),
            Tail(cluster.run_dir / "metrics.jsonl"),
        )
        self._output = Tail(cluster.folder / "driver.txt")
        self.seen = Seen()
        self.cases: list[Case] = []
        self.alarms: list[dict[str, Any]] = []  # faults between two cases
        self.excluded: list[dict[str, Any]] = []  # hosts that nothing in the program speaks against
        self._since_start = 0  # steps of this attempt
        self._resumed: int | None = None
        self._codes = 0
        self.began = time.time()

    @property
    def step(self) -> int:
        """The last step that was finished."""
        return self.seen.rows[-1]["step"] if self.seen.rows else 0

    def run(self, seconds: float) -> None:
        """Strikes until time is up, and returns when the last fault is over. Raises: UserError.

        seconds: length of the storm, from the first step on.
        """
        end, moved = float("inf"), time.monotonic()
        case: Case | None = None
        while case is not None or time.monotonic() < end:
            if self.watch(case):
                moved = time.monotonic()
                if end == float("inf"):
                    end, self.began = moved + seconds, time.time()
            if time.monotonic() - moved > self._limit:
                raise UserError(
                    f"no step for {self._limit:.0f} s, after {case}: "
                    f"{self._cluster.tail('driver.txt')}"
                )
            if case is not None:
                kind, now = KINDS[case.strike.kind], time.time()
                if case.calmed is None and now - case.at >= (kind.hold_s or 0.0):
                    case.hit.back()
                    case.calmed = time.time()
                ended = self._cluster.codes[self._codes :]
                if case.detected is None and ended and kind.rules in (("told",), ("gone",)):
                    told = ended[0] == 143
                    case.detected, case.rule = now, "told" if told else "gone"
                    case.said = f"the driver ended with {ended[0]}"
                    case.right = case.rule in kind.rules
                if case.done:
                    self._tell(case)
                    case = None
            elif self._since_start >= CALM and time.monotonic() < end:
                case = self._strike()
            time.sleep(TICK_S)
        if self._deeds.reaper_killed:
            until = time.monotonic() + SWEEP_S
            while time.monotonic() < until:
                self.watch(None)
                time.sleep(TICK_S)

    def watch(self, case: Case | None) -> bool:
        """Reads new events and metrics, and updates the current case.

        Tells whether a step was made.
        """
        self._cluster.tick()
        events, rows = (tail.rows() for tail in self._tails)
        for line in self._output.lines():
            if "resumed after step " in line:
                self._resumed = int(line.split("resumed after step ")[1].split()[0].strip(","))
        for event in events:
            self._event(event, case)
        rows = [r for r in rows if "step_time_s" in r]
        self._since_start += len(rows)
        self.seen.events += events
        self.seen.rows += rows
        if case is not None:
            for row in rows:
                self._row(row, case)
        return bool(rows)

    def _event(self, event: dict[str, Any], case: Case | None) -> None:
        if event["event"] == "start":
            self._since_start = 0
            self._deeds.attempt = int(event["message"].split()[1].strip(","))
        rules = KINDS[case.strike.kind].rules if case is not None else ()
        if event["event"] == "warning" and "straggler" in rules:
            if case is not None and case.detected is None and event["rule"] == "straggler":
                self._detect(case, event, event["time"])
        if event["event"] == "excluded" and not self._deeds.errors:
            self.excluded.append(event)
            self._say(f"INNOCENT: {event['message']}")
        if event["event"] != "fault":
            return
        if case is None:
            self.alarms.append(event)
            self._say(f"false alarm: {event['rule']}: {event['message']}")
        elif case.detected is None and rules and "straggler" not in rules:
            self._detect(case, event, event["time"])
        elif rules and "straggler" not in rules:
            case.again += 1
        else:
            case.alarms += 1
            case.said = event["message"]

    def _detect(self, case: Case, event: dict[str, Any], at: float) -> None:
        kind = KINDS[case.strike.kind]
        case.detected, case.rule, case.said = at, event["rule"], event["message"]
        named = set(event["ranks"]) & set(case.hit.ranks) | set(event["hosts"]) & set(
            case.hit.hosts
        )
        nobody = kind.target == "none" and not event["hosts"]
        case.right = (bool(named) or nobody) and event["rule"] in kind.rules

    def _row(self, row: dict[str, Any], case: Case) -> None:
        """A step ended."""
        kind = KINDS[case.strike.kind]
        if kind.rules and "straggler" not in kind.rules:
            fresh = case.detected is not None and row["time"] > case.detected
            if fresh and case.back is None and self._deeds.attempt > case.attempt:
                case.back, case.resumed = row["time"], self._resumed
            return
        if "straggler" in kind.rules:
            late = row["step"] > case.step + 60 and case.detected is None
            case.back = row["time"] if case.detected is not None or late else None
            return
        if case.calmed is not None and row["time"] > case.calmed:
            if row["step"] >= case.step + AFTER and self._since_start >= AFTER:
                case.back = row["time"]

    def _strike(self) -> Case | None:
        strike = next(self._plan)
        hit = self._deeds.do(strike)
        if hit is None:
            self._say(f"{strike.kind}: nothing to strike now")
            return None
        case = Case(strike, hit, time.time(), self.step, self._deeds.attempt)
        self._codes = len(self._cluster.codes)
        self.cases.append(case)
        self._say(f"{case.at - self.began:5.0f} s, step {case.step}: {strike.kind} {_where(hit)}")
        return case

    def _tell(self, case: Case) -> None:
        late = 0.0 if case.detected is None else case.detected - case.at
        outcome = "not found" if case.detected is None else f"{case.rule} after {late:.1f} s"
        assert case.back is not None
        wrong = "" if case.right in (None, True) else ", WRONGLY NAMED"
        alarms = f", {case.alarms} FALSE ALARMS" if case.alarms else ""
        needs_restart = bool(KINDS[case.strike.kind].rules)
        self._say(
            f"        {outcome if needs_restart else 'no restart'}{wrong}{alarms}, training after "
            f"{case.back - case.at:.1f} s: {case.said}"
        )


def _where(hit: Hit) -> str:
    words = [f"rank {r}" for r in hit.ranks] + list(hit.hosts) + ([hit.note] if hit.note else [])
    return ", ".join(words)


# ---- account
#
# Each fault and what became of it, what does not hold, table and picture.
#
# The rows are those of the result file; times are seconds since the storm began. A run has one
# lineage when every step that was ever done, however often, had the loss of the undisturbed run.


Row = Mapping[str, Any]
POINTS = 800  # (chosen) of the line in the picture


def rows(cases: Sequence[Case], began: float) -> list[dict[str, Any]]:
    """Returns a row for each fault."""
    return [
        {
            "fault": case.strike.kind,
            "at_s": _since(case.at, began),
            "step": case.step,
            "struck": _named(case),
            "wanted": list(KINDS[case.strike.kind].rules),
            "rule": case.rule,
            "said": case.said,
            "right": case.right,
            "found_s": _since(case.detected, case.at),
            "training_s": _since(case.back, case.at),
            "resumed": case.resumed,
            "false_alarms": case.alarms,
            "more_faults": case.again,
        }
        for case in cases
    ]


def _since(moment: float | None, began: float) -> float | None:
    return None if moment is None else round(max(moment - began, 0.0), 2)


def _named(case: Case) -> str:
    hit = case.hit
    words = [f"rank {r}" for r in hit.ranks] + list(hit.hosts) + ([hit.note] if hit.note else [])
    return ", ".join(words)


def lineage(ours: Sequence[Row], theirs: Sequence[Row], steps: int, starts: int) -> list[str]:
    """Returns what is wrong with the steps of a disturbed run, beside an undisturbed one.

    A loss that is not finite (None in a row) was caused by a fault, so its step must be repeated.
    ours, theirs: rows of metrics.jsonl of the disturbed and of the undisturbed run. starts: how
    often the job was started; steps may be repeated only after a start.
    """
    want = {r["step"]: r["loss"] for r in theirs}
    last = {r["step"]: r["loss"] for r in ours}
    seen = [r for r in ours if r["loss"] is not None or last[r["step"]] is None]
    other = sorted({r["step"] for r in seen if r["loss"] != want.get(r["step"])})
    backwards = sum(b["step"] <= a["step"] for a, b in zip(ours, ours[1:], strict=False))
    wrong = []
    if other:
        wrong.append(
            f"{len(other)} steps have another loss, the first is {other[0]}: {last[other[0]]}, not "
            f"{want.get(other[0])}"
        )
    if backwards >= starts:
        wrong.append(f"steps began again {backwards} times in {starts} starts")
    if max((r["step"] for r in ours), default=0) != steps:
        wrong.append(f"the last step is not {steps}")
    return wrong


def summary(cases: Sequence[Row], between: Sequence[Row]) -> dict[str, Any]:
    """Returns the figures of all rows. between: faults that were reported when nobody made one."""
    relevant = [r for r in cases if r["wanted"]]
    times = sorted(r["found_s"] for r in relevant if r["found_s"] is not None)
    back = sorted(r["training_s"] for r in relevant if r["training_s"] is not None)
    return {
        "faults": len(cases),
        "to_be_found": len(relevant),
        "not_found": sum(r["rule"] is None for r in relevant),
        "wrongly_named": sum(r["right"] is False for r in relevant),
        "false_alarms": sum(r["false_alarms"] for r in cases) + len(between),
        "found_s": _quantiles(times),
        "training_s": _quantiles(back),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    last = len(values) - 1
    at = {"median": last // 2, "p90": math.ceil(0.9 * last), "most": last}
    return {name: values[i] for name, i in at.items()}


def line(steps: Sequence[Row], began: float) -> list[list[float]]:
    """Returns (seconds, step) of some of the rows, for the picture."""
    every = max(len(steps) // POINTS, 1)
    shown = [
        r
        for i, r in enumerate(steps)
        if i % every == 0
        or i == len(steps) - 1
        or r["step"] <= steps[i - 1]["step"]
        or steps[i + 1]["step"] <= r["step"]
    ]
    return [[round(r["time"] - began, 2), r["step"]] for r in shown]


def draw(path: Path) -> None:
    """Draws the result file: steps over time, and below when each kind struck; SVG and PNG."""
    from matplotlib.patches import Patch

    result = read(path)
    kinds = [k for k in KINDS if any(r["fault"] == k for r in result["rows"])][::-1]
    heights = 3, max(0.2 * len(kinds), 0.5)
    figure, (top, below) = panels(
        rows=2, size=(11, 0.6 + sum(heights)), heights=heights, sharex=True
    )
    minutes = [at / 60 for at, _ in result["line"]]
    top.plot(minutes, [step for _, step in result["line"]], color="#0072B2", linewidth=1.2)
    top.set_ylabel("optimizer step")
    for r in result["rows"]:
        at, y = r["at_s"] / 60, kinds.index(r["fault"])
        seen, back = r["found_s"] or 0.0, r["training_s"] or 0.0
        if r["wanted"]:
            below.barh(y, seen / 60, 0.7, at, color="#D55E00")
            below.barh(y, (back - seen) / 60, 0.7, at + seen / 60, color="#E69F00")
            top.axvline(at, color="#D55E00", linewidth=0.5, alpha=0.5)
        else:
            below.barh(y, back / 60, 0.7, at, color="#009E73")
            top.axvline(at, color="#009E73", linewidth=0.5, alpha=0.5)
        if r["false_alarms"] or (r["wanted"] and not r["right"]):
            below.plot(at, y, "x", color="black", markersize=8)
    below.set_yticks(range(len(kinds)), kinds, fontsize=8)
    below.set_xlabel("time since the storm began (minutes)")
    legend = [
        ("#D55E00", "until it was found"),
        ("#E69F00", "until training went on"),
        ("#009E73", "training goes on meanwhile"),
    ]
    below.legend(
        handles=[Patch(color=c, label=text) for c, text in legend],
        frameon=False,
        fontsize=8,
        ncols=3,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
    )
    top.set_title(result["title"], loc="left", fontsize=10)
    save(figure, path)


def table(path: Path) -> str:
    """Returns a Markdown table of the result file: a row a kind."""
    result, lines = read(path), []
    for name, kind in KINDS.items():
        cases = [r for r in result["rows"] if r["fault"] == name]
        if not cases:
            continue
        rules = sorted({r["rule"] or "not found" for r in cases}) if kind.rules else ["no restart"]
        seen, back = (
            _quantiles(sorted(r[key] for r in cases if r[key] is not None))
            for key in ("found_s", "training_s")
        )
        cells = [
            kind.what,
            len(cases),
            ", ".join(rules),
            _cell(seen),
            _cell(back) if kind.rules else "-",
            sum(r["false_alarms"] for r in cases),
        ]
        lines.append(cells)
    heads = (
        "fault",
        "times",
        "rule",
        "found after (s), median, most",
        "training after (s), median, most",
        "false alarms",
    )
    return "\n\n".join([f"{result['title']}.", markdown_table(heads, lines), source(result)])


def drills(path: Path) -> str:
    """Returns which faults a run by steps met (experiments/chaos.py without a storm), and what was
    said of them, as Markdown."""
    result = read(path)
    spent = result["effective"]
    same = "the same parameters bit for bit" if not result["different"] else "OTHER parameters"
    text = (
        f"{spent['faults']} faults, {same} as without; {100 * spent['ettr']:.0f} % of "
        f"{spent['total_s']:.0f} s trained, {spent['redone_s']:.0f} s of it again:"
    )
    columns = {"fault": "fault", "rule": "rule", "what was said": "named"}
    return f"{text}\n\n{reporting.table(path, columns)}"


def _cell(values: Mapping[str, float]) -> str:
    return f"{values['median']:.1f}, {values['most']:.1f}" if values else "-"


# ---- the job of a storm
#
# Its processes, how it ends, and what it is compared with.


SMALLEST = (
    "--model.layers=1", "--model.width=32", "--model.heads=2", "--model.kv_heads=2",
    "--model.head_width=16", "--model.mlp=64", "--train.global_batch=4", "--train.seq_len=32",
    "--eval.every=0", "--eval.batches=0", "--eval.sample_tokens=0", "--log.tensorboard=false",
    "--log.every=100", "--optim.schedule=constant", "--checkpoint.keep=3", "--emulate=1",
)  # fmt: skip
ENDLESS = 10**6  # steps; a storm says at its end how many there are
REST = 60  # steps after the storm
HOSTS = 2
BUSY = "while True: pass"  # what two other jobs of the machine do


class Settings(Protocol):
    """The settings of a storm, from experiments/chaos.py:Config."""

    processes: int
    every: int
    seed: int
    stall_s: float
    minutes: float
    kinds: str
    pace_s: float
    busy: int


def finish(job: subprocess.Popen) -> int:
    """Waits for a driver, after Ctrl-C too: only it can end the processes of its job, which write
    into a folder that is removed next. Returns its exit code."""
    try:
        return job.wait()
    except KeyboardInterrupt:
        job.send_signal(signal.SIGINT)  # where it had the one of the terminal, it ends at once
        job.wait()
        raise


def parameters(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Returns the last checkpoint's arrays by name."""
    from megajax.checkpoint.manager import CheckpointManager
    from megajax.core.tree import named_leaves
    from megajax.training.config import Config as Training
    from megajax.training.step import make_train_step

    cfg = config.load_json(Training, folder / "run" / "config.json")
    like = vars(make_train_step(cfg, cfg.mesh.build()).abstract_state)
    arrays = CheckpointManager(folder / "run" / "checkpoints", keep=0).restore(step, like=like)
    return {name: np.asarray(x) for name, x in named_leaves(arrays)}


def run(cfg: Settings, path: Path, environ: Mapping[str, str]) -> int:
    """Runs a storm and an undisturbed job, compares, accounts. Returns 1 when something does not
    hold."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(cfg, folder)
        job.cluster = Cluster(folder, job.flags, job.command, HOSTS + 1, environ)
        mounted = len(job.cluster.mounted) == 2
        kinds = tuple(
            k
            for k in (cfg.kinds.split(",") if cfg.kinds else KINDS)
            if mounted or KINDS[k].needs != "mount"
        )
        if not mounted:
            print("no small disks can be mounted here: no disk is filled")
        deeds = Deeds(job.cluster, folder / "mail")
        storm = Storm(
            job.cluster,
            deeds,
            strikes(cfg.seed, kinds),
            30 * cfg.stall_s,
            lambda text: print(text, flush=True),
        )
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cfg.busy)]
        try:
            storm.run(60 * cfg.minutes)
            job.finish(storm)
            wrong = job.compare(storm)
        finally:
            job.cluster.close()
            for process in busy:
                process.kill()
                process.wait()
        cases = rows(storm.cases, storm.began)
        return conclude(cfg, path, storm, cases, wrong)


class Job:
    """The trainers of a storm, and the comparison with an undisturbed run."""

    cluster: Cluster

    def __init__(self, cfg: Settings, folder: Path):
        """folder: where the storm keeps its files."""
        self._cfg, self._folder, self._steps = cfg, folder, ENDLESS
        silence = cfg.stall_s / 2
        each = cfg.processes // HOSTS
        self.flags = [
            f"--hosts={HOSTS}",
            f"--min_hosts={HOSTS}",
            f"--processes={each}",
            "--max_restarts=10000",
            f"--step_s={cfg.stall_s}",
            f"--silence_s={silence}",
            f"--start_s={10 * cfg.stall_s}",
            f"--save_s={3 * cfg.stall_s}",
            "--period_s=0.5",
            "--backoff_s=0.1",
        ]

    def command(self, run_dir: Path | None = None) -> list[str]:
        """Returns the supervised command. run_dir: folder of an undisturbed run."""
        cfg = self._cfg
        pace = [f"pace={cfg.pace_s:f}@1:rank{r}:always" for r in range(cfg.processes)]
        faults = ",".join([*pace, f"@{self._folder / 'mail'}"])
        return [
            sys.executable,
            str(ROOT / "experiments" / "pretrain.py"),
            *SMALLEST,
            f"--train.steps={self._steps}",
            f"--checkpoint.every={cfg.every}",
            f"--run_dir={run_dir or self.cluster.run_dir}",
            f"--cache_dir={self._folder}/cache",
            *([f"--fault={faults}"] if run_dir is None else []),
        ]

    def finish(self, storm: Storm) -> None:
        """Lets the job end: the driver is told to stop, and the next one gets the last step."""
        self._steps = (storm.step + REST) // self._cfg.every * self._cfg.every
        print(f"the storm is over at step {storm.step}; the job ends after step {self._steps}")
        driver, end = self.cluster.driver, time.monotonic() + 30 * self._cfg.stall_s
        if driver is not None:
            driver.send_signal(signal.SIGTERM)
        while 0 not in self.cluster.codes:
            storm.watch(None)
            time.sleep(0.2)
            if time.monotonic() > end:
                raise UserError(f"the job does not end: {self.cluster.tail('driver.txt')}")
        storm.watch(None)

    def compare(self, storm: Storm) -> dict[str, Any]:
        """Returns {claim that does not hold: what was observed instead}."""
        wrong: dict[str, Any] = {}
        for _ in range(50):  # until the agents have gone home
            self.cluster.send_home()
            if not (left := self.cluster.leavings()):
                break
            time.sleep(0.2)
        if left:
            wrong["left behind"] = left
        quiet = self._folder / "undisturbed"
        quiet.mkdir()
        words = [
            sys.executable,
            SUPERVISE,
            *self.flags,
            f"--out={quiet}/watch",
            "--",
            *self.command(quiet / "run"),
        ]
        with open(quiet / "output.txt", "w") as out:
            job = subprocess.Popen(words, stdout=out, stderr=out, env=self.cluster.environment())
            code = finish(job)
        if code:
            raise UserError(f"the undisturbed job ended with {code}: see {quiet}/output.txt")
        mesh.start(self._cfg.processes)
        ours, want = (
            parameters(run.parent, self._steps) for run in (self.cluster.run_dir, quiet / "run")
        )
        if different := [k for k in want if not np.array_equal(ours[k], want[k], equal_nan=True)]:
            wrong["parameters"] = different
        theirs = [r for r in read_jsonl(quiet / "run" / "metrics.jsonl") if "step_time_s" in r]
        starts = sum(e["event"] == "start" for e in storm.seen.events)
        if problems := lineage(storm.seen.rows, theirs, self._steps, starts):
            wrong["lineage"] = problems
        return wrong


def conclude(
    cfg: Settings, path: Path, storm: Storm, cases: list[dict[str, Any]], wrong: dict[str, Any]
) -> int:
    """Writes the result of a storm. Returns 1 if a claim does not hold."""
    figures = summary(cases, storm.alarms) | {"excluded": len(storm.excluded)}
    spent = timeline.measured(storm.seen.events, storm.seen.rows)
    same = f"NOT: {', '.join(wrong)}" if wrong else "parameters and losses equal bit for bit"
    title = (
        f"{figures['faults']} faults in {cfg.minutes:g} minutes, {figures['not_found']} not found, "
        f"{figures['wrongly_named']} wrongly named, {figures['false_alarms']} false alarms, "
        f"{figures['excluded']} hosts excluded in vain; {same}"
    )
    about = results.facts(f"{cfg.processes} processes on {HOSTS} of {HOSTS + 1} hosts", "emulated")
    about |= {
        "title": title,
        **figures,
        "wrong": wrong,
        "effective": spent,
        "seed": cfg.seed,
        "between": storm.alarms,
        "line": line(storm.seen.rows, storm.began),
    }
    results.write(path, about, cases)
    draw(path)
    print(title, *(f"{name}: {text}" for name, text in wrong.items()), sep="\n")
    names = ("not_found", "wrongly_named", "false_alarms", "excluded")
    return 1 if wrong or any(figures[name] for name in names) else 0
