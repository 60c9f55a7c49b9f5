"""Minder (arXiv 2411.01791): names the machine of a training job that is about to stop the job.

    uv run experiments/minder.py                               # a demonstration, about a minute
    uv run experiments/minder.py train                         # fits a model on simulated jobs
    uv run experiments/minder.py train --prometheus=http://HOST:9090 --hours=24
    uv run experiments/minder.py train --source=monday.csv.gz,tuesday.parquet
    uv run experiments/minder.py evaluate --preset=paper       # beside rivals, on simulated jobs
    uv run experiments/minder.py watch --prometheus=http://HOST:9090 --model=MODEL
    uv run experiments/minder.py time --model=MODEL            # seconds a call, 1,500 machines
    uv run experiments/minder.py unlike                        # judged on three other fleets

Without a verb the command trains a little, watches two simulated jobs and draws what it found.
`train` fits a model and writes it to --model; after Ctrl-C the same command resumes. `evaluate`
compares the detector with others (experiments/reports/minder.py). `unlike` fits and judges it on
three fleets that share no assumption with the simulator (minder_unlike.py). `watch` is a daemon
with such a model: it reads the metrics of all machines from Prometheus every few seconds, logs each
alert with a picture, and reports it to Alertmanager (docs/monitoring.md). The daemon keeps running
while the server is away; SIGTERM ends it with exit code 0. Exit code 2: a flag, the model or the
server's password is wrong.
"""

import megajax.core.interrupted  # noqa: F401

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.reports import minder as report
from experiments.reports import minder_unlike, minder_watch
from experiments.reports.reporting import closing
from megajax.core import config, mesh
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.monitor import results
from megajax.monitor.fleet import cases
from megajax.monitor.sources.http_query import shown
from megajax.systems.minder import Detector, Settings
from megajax.systems.minder.detector import Recent
from megajax.systems.minder.reporter import Heat, draw_alert

VERBS = ("train", "evaluate", "watch", "time", "unlike")


@dataclass(frozen=True)
class Train(Checked):
    """What the model is fitted on."""

    source: str = option(
        "", "files of metrics, one a job, joined by commas", verbs=("train",), flag="source"
    )
    hours: float = option(
        6.0,
        "how much of the past to read from the server",
        "h",
        verbs=("train",),
        flag="hours",
        above=0,
    )
    machines: int = option(
        64,
        "machines of the largest simulated job",
        verbs=("train",),
        flag="machines",
        at_least=4,
    )
    jobs: int = option(18, "number of simulated jobs", verbs=("train",), flag="jobs", at_least=1)
    steps: int = option(800, "training steps of the networks", flag="steps", at_least=1)
    seed: int = option(0, "random seed of networks and simulated jobs", flag="seed", at_least=0)


@dataclass(frozen=True)
class Config(Checked):
    """What to do it with."""

    model: str | None = option(
        None, "file of the model; none: OUT/model.npz, except that evaluate fits its own"
    )
    continuity_s: float | None = option(
        None,
        "how long a machine must differ until it is named; none: the model's, 240 if fitted now",
        "s",
        at_least=48,
        at_most=900,
    )
    strict: float | None = option(
        None,
        "factor on the learnt limits; above 1: fewer alerts; none: the model's, 1 if fitted now",
        above=0,
    )
    train: Train = group(Train)
    server: minder_watch.Server = group(minder_watch.Server)
    watch: minder_watch.WatchConfig = group(minder_watch.WatchConfig)
    evaluate: report.Config = group(report.Config)
    time: minder_watch.TimeConfig = group(minder_watch.TimeConfig)
    unlike: minder_unlike.Config = group(minder_unlike.Config)
    out: str = results.out_option("minder")

    @property
    def model_path(self) -> Path:
        """The model's file, of train, watch and time."""
        return expand(self.model or f"{self.out}/model.npz", "model")

    def asked(self, model: str | None) -> report.Config:
        """Returns what evaluate is to do. model: None: it fits one."""
        base = self.evaluate
        said = {n: self.out for n in ("out", "state") if getattr(base, n) == "runs/minder"}
        return replace(base, **said, **({"model": model} if model else {}))

    def settings(self, base: Settings = Settings()) -> Settings:
        """Returns settings with what the flags say."""
        said = {"continuity_s": self.continuity_s, "strict": self.strict}
        return replace(base, **{k: v for k, v in said.items() if v is not None})


def tiny() -> Config:
    """Few and small jobs."""
    return Config(train=Train(machines=8, jobs=3, steps=200), evaluate=report.tiny())


def full() -> Config:
    """Settings for real use."""
    return Config(evaluate=report.Config())


# ---- train


def fit(cfg: Config) -> Detector:
    """Fits a detector and saves it; after Ctrl-C the same call resumes."""
    path = cfg.model_path
    results.writable_folder(str(path.parent), "model")
    ignored = ("watch", "evaluate", "time", "unlike", "model", "out", "server.timeout_s")
    same = config.fingerprint(cfg, ignore=ignored)
    folder = results.writable_folder(f"{cfg.out}/training/{same}")
    jobs = _sources(cfg, folder)
    detector = Detector.fit(
        jobs,
        seed=cfg.train.seed,
        steps=cfg.train.steps,
        settings=cfg.settings(),
        folder=folder / "steps",
        tell=_say,
    )
    detector.save(path)
    minder_watch.forget(folder)
    _say(f"{path}: metrics {', '.join(detector.profile.metrics)}")
    return detector


def _sources(cfg: Config, folder: Path) -> Sequence[Any]:
    """Returns what to fit on, one a job."""
    if cfg.train.source and cfg.server.prometheus:
        raise UserError("give --source or --prometheus, and not both (--source, --prometheus)")
    if cfg.train.source:
        return minder_watch.paths(cfg.train.source)
    if cfg.server.prometheus:
        return minder_watch.recorded(
            minder_watch.source(cfg.server, None),
            cfg.train.hours,
            cfg.server.only,
            folder / "recorded.npz",
            _say,
        )
    return minder_watch.simulated(cfg.train.jobs, cfg.train.machines, cfg.train.seed, _say)


# ---- a demonstration


def demonstrate(cfg: Config) -> int:
    """Trains a little, watches two simulated jobs, draws what it found, and evaluates."""
    folder = results.writable_folder(cfg.out)
    fit(cfg)
    for number, case in enumerate(cases(2, (8,), 4, split="validate", noise="low", healthy=0), 1):
        detector, recent, heat, alerts = Detector.load(cfg.model_path), Recent(3600), Heat(), []
        for at in range(case.start, case.end, 60):
            grid = case.fleet.read(at, min(at + 60, case.end))
            recent.add(grid)
            alerts += detector.update(grid)
            heat.add(at, detector.scores)
        sick = ", ".join(f"{f.machine} ({f.kind})" for f in case.faults)
        said = "; ".join(a.message for a in alerts) or "no alert"
        _say(f"job {number} of 2, {len(detector.machines)} machines, faulty: {sick} | {said}")
        heat.write(folder / f"scores{number}.png", detector.named)
        for alert in alerts[:1]:
            draw_alert(alert, recent, case.end, folder / f"alert{number}.png")
    report.evaluate(cfg.asked(str(cfg.model_path)))
    _say(f"{folder}: model, pictures, table; so little training shows that all of it runs, no more")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def adapt(base: Config, flags: Mapping[str, Any], read: Mapping[str, Any]) -> Config:
    """Returns the base of train and watch without a preset: the settings for real use."""
    verb = next((word for word in sys.argv[1:] if word in VERBS), "")
    return full() if verb in minder_watch.FROM_SERVER and not config.start_given() else base


def main(verb: str = "") -> int:
    """Does what the word says."""
    if verb:
        config.choose(verb, dict.fromkeys(VERBS))
    cfg, base = config.from_flags(PRESETS, adapt, verb or None)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {shown(new) if '://' in str(new) else new}")
    if cfg.server.only:
        try:
            re.compile(cfg.server.only)
        except re.error as error:
            raise UserError(f"only={cfg.server.only} is no pattern: {error} (--only)") from None
    mesh.start(emulate=1 if verb == "watch" else None)  # GPUs of its host belong to the job
    mesh.cache_programs("~/.cache/megajax")
    if verb == "watch":
        return minder_watch.watch(
            cfg.watch, cfg.server, cfg.model_path, cfg.settings, cfg.train.steps, cfg.out
        )
    if verb == "evaluate":
        report.evaluate(cfg.asked(cfg.model))
        return 0
    if verb == "train":
        fit(cfg)
        return 0
    if verb == "time":
        minder_watch.measure(cfg.time, cfg.model_path, cfg.out, _say)
        return 0
    if verb == "unlike":
        minder_unlike.measure(cfg.unlike, cfg.train.steps, cfg.out, _say)
        return 0
    code = demonstrate(cfg)
    print(closing(config.start_name()))
    return code


PRESETS = {"tiny": tiny, "paper": full}
config.define_flags(PRESETS, "tiny")

if __name__ == "__main__":
    sys.exit(config.run(main, optional=1))
