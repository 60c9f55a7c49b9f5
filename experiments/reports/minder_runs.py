"""Runs detectors on the cases of an evaluation, stores what they said, and counts it.

A case is made once for all detectors. What they said of it is in a file of its own, under a key
that changes with a detector's code, fit and threshold, so the same command goes on after a stop and
a new version of one detector runs that one alone.
"""

import ast
import dataclasses
import functools
import hashlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reports import minder_rivals
from experiments.reports import minder_rivals as rivals
from experiments.reports.minder_rivals import RIVALS, Base, Tuned, View, tune
from experiments.reports.reporting import wilson
from megajax.core.files import write_whole
from megajax.monitor.fleet import Case, cases
from megajax.systems import minder
from megajax.systems.minder import Detector

# ---- counts
#
# Counts of a detector's alerts: what was named, what was said in vain, how sure a figure is.
#
# An alert is true if it names the machine of a fault after the fault's onset; further alerts of
# that machine are repeats and count as nothing. Every other alert is false, but for a machine that
# left the job as it had declared. A fault that no alert names is a miss; several faults of a case
# count each. Intervals are percentiles of bootstrap samples over cases, drawn within each size of
# job; two detectors are compared on the same samples of the same cases.
#
# Legend: X cases, B bootstrap samples.


SAMPLES = 2000


def judged(case: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns {'named': delay in s by fault (None: a miss), 'vain': false alerts, 'repeats'}.

    case: has 'faults', each with machine, start and end, and 'left', pairs of a machine and the
    time of its departure. alerts: each has a machine and the time `at`.
    """
    named: list[float | None] = [None] * len(case["faults"])
    vain = repeats = 0
    gone = {machine: at for machine, at in case["left"]}
    for alert in sorted(alerts, key=lambda a: a["at"]):
        hits = [
            k
            for k, fault in enumerate(case["faults"])
            if alert["machine"] == fault["machine"] and alert["at"] > fault["start"]
        ]
        new = [k for k in hits if named[k] is None]
        for k in new:
            named[k] = alert["at"] - case["faults"][k]["start"]
        left = alert["machine"] in gone and alert["at"] >= gone[alert["machine"]]
        if not hits and not left:
            vain += 1
        repeats += bool(hits) and not new
    return {"named": named, "vain": vain, "repeats": repeats}


def triple(case: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """Returns (named, in vain, faults)."""
    judgement = judged(case, alerts)
    return sum(d is not None for d in judgement["named"]), judgement["vain"], len(case["faults"])


def quality(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Returns precision, recall and F1 of (..., 3) sums of named, in vain and faults. Without an
    alert the precision is 1; without a fault the recall is 1."""
    named, vain, faults = np.moveaxis(np.asarray(counts, float), -1, 0)
    alerts = named + vain
    return {
        "precision": np.where(alerts > 0, named / np.maximum(alerts, 1), 1.0),
        "recall": np.where(faults > 0, named / np.maximum(faults, 1), 1.0),
        "f1": np.where(faults + alerts > 0, 2 * named / np.maximum(faults + alerts, 1), 1.0),
    }


def resampled(sizes: Sequence[int], seed: int = 0, samples: int = SAMPLES) -> np.ndarray:
    """Returns how often each case is in each sample, (B, X); samples keep the cases of a size."""
    rng, sizes_X = np.random.default_rng(seed), np.asarray(sizes)
    times_BX = np.zeros((samples, len(sizes_X)))
    for size in np.unique(sizes_X):
        rows = np.flatnonzero(sizes_X == size)
        times_BX[:, rows] = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), samples)
    return times_BX


def summary(counts_X3: np.ndarray, times_BX: np.ndarray) -> dict[str, Any]:
    """Returns counts, precision, recall, F1, and 95 % intervals of these."""
    counts_X3 = np.asarray(counts_X3, float)
    total = counts_X3.sum(0)
    drawn = quality(times_BX @ counts_X3)
    row: dict[str, Any] = dict(
        zip(("named", "vain", "faults"), (int(v) for v in total), strict=True)
    )
    row["cases"] = len(counts_X3)
    for name, value in quality(total).items():
        row[name] = float(value)
        row[f"{name}_95"] = [float(v) for v in np.percentile(drawn[name], (2.5, 97.5))]
    return row


def difference(ours_X3: np.ndarray, other_X3: np.ndarray, times_BX: np.ndarray) -> dict[str, Any]:
    """Returns our F1 less another's on the same cases, with its 95 % interval."""
    ours_X3, other_X3 = np.asarray(ours_X3, float), np.asarray(other_X3, float)
    apart_B = quality(times_BX @ ours_X3)["f1"] - quality(times_BX @ other_X3)["f1"]
    value = quality(ours_X3.sum(0))["f1"] - quality(other_X3.sum(0))["f1"]
    low, high = np.percentile(apart_B, (2.5, 97.5))
    return {
        "f1_more": float(value),
        "f1_more_95": [float(low), float(high)],
        "better": bool(low > 0),
    }


def rate(count: int, days: float) -> dict[str, Any]:
    """Returns events a day and the exact 95 % interval of a Poisson process (Garwood 1936)."""
    from scipy.special import gammaincinv

    low = gammaincinv(count, 0.025) if count else 0.0
    high = gammaincinv(count + 1, 0.975)
    return {
        "false_alarms": count,
        "days": days,
        "a_day": count / days,
        "a_day_95": [float(low / days), float(high / days)],
    }


def delays(seconds: Sequence[float]) -> dict[str, float]:
    """Returns quantiles of the seconds from onset to alert."""
    if not len(seconds):
        return {}
    marks = (10, 50, 90, 100)
    return {f"p{q}": float(v) for q, v in zip(marks, np.percentile(seconds, marks), strict=True)}


# ---- cases


OURS = "ours"
FIT_SIZES, TUNE_SIZES = (8, 16, 64), (4, 16, 64, 256)
HEALTHY = 1024  # machines of a long healthy run
HOURS = 1.0  # of one such run
HEALTHY_TOO = (OURS, "minder-paper", "median")  # detectors that see them: they take long
MIXES_APART = 1000  # between the seeds of two mixes


@dataclasses.dataclass(frozen=True)
class Item:
    """One case: the k-th of its size and mix. mix: empty for a long healthy run."""

    split: str
    seed: int
    mix: str
    size: int
    k: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.split}-{self.seed}-{self.mix or 'healthy'}-{self.size}-{self.k}"

    def case(self) -> Case:
        """Returns the simulated case."""
        if not self.mix:
            healthy = _nth(self.k, self.size, self.seed, split=self.split, healthy=1.0)
            return dataclasses.replace(healthy, end=healthy.start + int(3600 * HOURS))
        return _nth(self.k, self.size, self.seed, split=self.split, mix=self.mix)


def _nth(k: int, size: int, seed: int, **how: Any) -> Case:
    return next(itertools.islice(cases(k + 1, size, seed, **how), k, None))


def items(
    split: str,
    seed: int,
    sizes: Sequence[int],
    counts: Sequence[int],
    mixes: Sequence[str],
    hours: float,
) -> list[Item]:
    """Returns the cases, small and large ones in turn. The first mix has half of the cases of each
    size, or all if it is the only one."""
    ordered = []
    for size, count in zip(sizes, counts, strict=True):
        others = mixes[1:]
        each = count // 2 // max(len(others), 1) if others else 0
        shares = {mixes[0]: count - each * len(others)} | dict.fromkeys(others, each)
        for number, (mix, share) in enumerate(shares.items()):
            seed_of_mix = seed + number * MIXES_APART
            ordered += [
                (k / max(share, 1), Item(split, seed_of_mix, mix, size, k)) for k in range(share)
            ]
    runs = int(hours / HOURS)
    ordered += [(k / runs, Item(split, seed + 1, "", HEALTHY, k)) for k in range(runs)]
    return [item for _, item in sorted(ordered, key=lambda x: x[0])]


def described(item: Item, case: Case) -> dict[str, Any]:
    """Returns the description of a case that its file holds."""
    return {
        **dataclasses.asdict(item),
        "noise": case.noise,
        "seconds": case.end - case.start,
        "faults": [
            {"machine": f.machine, "kind": f.kind, "start": f.start, "end": f.end, "speed": f.speed}
            for f in case.faults
        ],
        "left": [list(one) for one in case.fleet.departures],
    }


# ---- detectors


def code() -> str:
    """Returns a hash of our detector's sources: detector.py and all that it imports of its package.

    alert.py is not among them: it words and remembers alerts.
    """
    folder, names, new = Path(minder.__path__[0]), {"alert"}, {"detector"}
    while new:
        names |= new
        texts = [(folder / f"{name}.py").read_text() for name in new]
        new = set[str]().union(*map(_imports, texts)) - names
    return _hash(*((folder / f"{n}.py").read_bytes() for n in sorted(names - {"alert"})))


def _imports(text: str) -> set[str]:
    """Returns the modules of the detector's package that a module imports."""
    package, modules = minder.__name__, set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            modules |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package + "."):
            modules.add((node.module or "").removeprefix(package + "."))
    return modules


def code_of_rivals() -> str:
    """Returns a hash of the rivals' sources."""
    return _hash(Path(minder_rivals.__file__).read_bytes())


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return digest.hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Made:
    """A detector that is ready: its name, its file, its key."""

    name: str
    path: Path
    key: str


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What detectors learn from.

    jobs, seed: number and random seed of the jobs to fit on. steps: training steps of a network.
    tune_cases, tune_seed: number and random seed of the validation cases that tune the rivals.
    """

    jobs: int
    seed: int
    steps: int
    tune_cases: int
    tune_seed: int

    def sources(self) -> Iterator[Case]:
        """Yields the jobs to fit on: mostly healthy, without labels."""
        yield from cases(self.jobs, FIT_SIZES, self.seed, split="train", healthy=0.8)


def fitted(folder: Path, recipe: Recipe, model: str, tell: Any) -> Path:
    """Returns the file of our detector, fitted now or before, or the one that was given."""
    if model:
        return Path(model)
    path = folder / f"ours-{_hash(recipe.jobs, recipe.seed, recipe.steps, code())}.npz"
    if not path.exists():
        tell(f"fitting our detector on {recipe.jobs} jobs")
        grids = [case.read() for case in recipe.sources()]
        Detector.fit(grids, seed=0, steps=recipe.steps).save(path)
    return path


def base_of(folder: Path, model: Path, recipe: Recipe) -> Path:
    """Returns the file of the parts that rivals share, made from the first model of a recipe."""
    path = folder / f"base-{_hash(recipe.jobs, recipe.seed, recipe.steps)}.npz"
    if not path.exists():
        Base.of(Detector.load(model)).save(path)
    return path


def ready(names: Sequence[str], folder: Path, model: Path, recipe: Recipe, tell: Any) -> list[Made]:
    """Returns the detectors; rivals that are not yet learnt and tuned are learnt and tuned now."""
    model_hash = _hash(model.read_bytes())
    made = [Made(OURS, model, f"{OURS}-{_hash(model_hash, code())}")] * (OURS in names)
    base = base_of(folder, model, recipe)
    shared, common = Base.load(base), _hash(base.read_bytes(), code_of_rivals(), recipe)
    rivals = [n for n in names if n in RIVALS]
    for name in (n for n in names if n in minder_rivals.VARIANTS):
        key = _hash(name, model_hash, code(), code_of_rivals(), recipe)
        path = folder / f"{name}-{key}.npz"
        if not path.exists():
            tell(f"fitting {name}: {minder_rivals.VARIANTS[name].what}")
            minder_rivals.fit_ablated(name, model, list(recipe.sources()), recipe.steps, path)
        made.append(Made(name, path, f"{name}-{key}"))
    paths = {name: folder / f"{name}-{common}.npz" for name in rivals}
    if new := [name for name in rivals if not paths[name].exists()]:
        tell(f"fitting and tuning {', '.join(new)}")
        learn = [View(c.read(), c.fleet.departures, shared) for c in recipe.sources()]
        drawn = list(cases(recipe.tune_cases, TUNE_SIZES, recipe.tune_seed, split="validate"))
        views = (View(c.read(), c.fleet.departures, shared) for c in drawn)
        facts = [described(Item("validate", recipe.tune_seed, "", 0, 0), c) for c in drawn]

        def counted(number: int, said: Sequence[Any]) -> tuple[int, int, int]:
            return triple(facts[number], [one._asdict() for one in said])

        for one in tune(new, learn, views, counted, recipe.seed, recipe.steps):
            one.save(paths[one.name])
            tell(f"{one.name}: F1 {one.f1:.3f} on the tuning cases, {dict(one.tuned)}")
    made += [Made(n, p, f"{n}-{_hash(p.read_bytes())}") for n, p in paths.items()]
    return made


# ---- runs


def run(folder: Path, todo: Sequence[Item], made: Sequence[Made], base: Path, tell: Any) -> None:
    """Runs the detectors that have not seen a case yet; a case's file is written when all have seen
    it."""
    rivals = {one.key: Tuned.load(one.path) for one in made if one.name in RIVALS}
    shared = Base.load(base)
    for number, item in enumerate(todo):
        path = folder / f"{item.name}.json"
        record = json.loads(path.read_text()) if path.exists() else None
        missing = [o for o in asked(item, made) if record is None or o.key not in record["said"]]
        if not missing:
            continue
        case = item.case()
        record = record or described(item, case) | {"said": {}, "took": {}}
        began = time.process_time()
        view = View(case.read(), case.fleet.departures, shared)
        record["took"]["read"] = time.process_time() - began
        for one in missing:
            began = time.process_time()
            if one.name == OURS:
                said = minder_rivals.our_alerts(one.path, view.grid, view.departures)
            elif one.name in minder_rivals.VARIANTS:
                said = minder_rivals.ablated_alerts(one.name, one.path, case)
            else:
                said = rivals[one.key].alerts(view)
            record["took"][one.key] = time.process_time() - began
            record["said"][one.key] = [alert._asdict() for alert in said]
        write_whole(path, json.dumps(record, default=float))
        tell(f"{number + 1}/{len(todo)} {item.name}")


def finished(
    folder: Path, chosen: Sequence[Item], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the cases that are finished, with 'said' and 'took' by the detectors' names: of each
    detector the version that ran last."""
    for item in chosen:
        path = folder / f"{item.name}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        last = {key.rpartition("-")[0]: key for key in record["said"]}  # in the order of running
        for member in ("said", "took"):
            record[member] = {n: record[member][last[n]] for n in names if n in last}
        yield record


ALONE = (  # one thread of XLA and of BLAS
    "XLA_FLAGS=--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OPENBLAS_NUM_THREADS=1",
    "OMP_NUM_THREADS=1",
)


def shared(
    folder: Path,
    todo: Sequence[Item],
    made: Sequence[Made],
    base: Path,
    processes: int,
    tell: Any,
) -> None:
    """Runs the unfinished cases in several processes of one thread each."""
    missing = [item for item in todo if not done(folder, item, made)]
    if processes == 1 or len(missing) < 2:
        run(folder, missing, made, base, tell)
        return
    workers = []
    try:
        for k in range(processes):
            work = folder / f"work-{k}.json"
            task = {
                "items": [dataclasses.asdict(item) for item in missing[k::processes]],
                "made": [dataclasses.asdict(one) for one in made],
                "base": base,
            }
            work.write_text(json.dumps(task, default=str))
            program = [sys.executable, "-m", "experiments.reports.minder_runs", str(work)]
            workers.append(subprocess.Popen(["env", *ALONE, *program]))
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.terminate()
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a process of the evaluation failed; its error stands above")


def main(path: str) -> None:
    """Does the work of a file that `shared` wrote; prints what is done."""
    work = json.loads(Path(path).read_text())
    made = [Made(m["name"], Path(m["path"]), m["key"]) for m in work["made"]]
    todo = [Item(**item) for item in work["items"]]
    tell = functools.partial(print, flush=True)
    run(Path(path).parent, todo, made, Path(work["base"]), tell)


def done(folder: Path, item: Item, made: Sequence[Made]) -> bool:
    """Tells whether all detectors have seen a case."""
    path = folder / f"{item.name}.json"
    keys = {one.key for one in asked(item, made)}
    return path.exists() and keys <= json.loads(path.read_text())["said"].keys()


def asked(item: Item, made: Sequence[Made]) -> list[Made]:
    """Returns the detectors that see a case."""
    return [one for one in made if item.mix or one.name in HEALTHY_TOO]


def tuned(folder: Path, made: Sequence[Made]) -> dict[str, Any]:
    """Returns the tuned options of the rivals, and their F1 on the tuning cases."""
    path = folder / "tuned.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    new = [Tuned.load(one.path) for one in made if one.name in RIVALS]
    record |= {one.name: {"f1": one.f1} | dict(one.tuned) for one in new}
    path.write_text(json.dumps(record, indent=1))
    return record


if __name__ == "__main__":
    main(sys.argv[1])


# ---- rows of results


Row = dict[str, Any]


def evaluation_rows(
    records: Sequence[Mapping], names: Sequence[str], seed: int = 0
) -> Iterator[Row]:
    """Yields the rows of a result file.

    records: of `finished`. A comparison counts only the cases that all detectors have seen.
    """
    judged = [c for c in records if c["mix"]]
    complete = [c for c in judged if all(n in c["said"] for n in names)]
    yield from _overall(complete, names, seed)
    for part, of in (("size", "size"), ("noise", "noise"), ("mix", "mix")):
        for value in dict.fromkeys(
            c[of] for c in sorted(complete, key=lambda c: (c["size"], c[of]))
        ):
            chosen = [c for c in complete if c[of] == value]
            for row in _overall(chosen, names, seed):
                yield row | {"part": part, of: value}
    for name in names:
        yield from _kinds(complete, name)
        found_s = [d for _, d in _named(complete, name) if d is not None]
        faults = sum(len(c["faults"]) for c in complete)
        yield {
            "part": "delays",
            "detector": name,
            "faults": faults,
            "seconds": sorted(round(d) for d in found_s),
        }
    healthy = [c for c in records if not c["mix"]]
    for name in names:
        yield from _alarms(healthy, name)
        yield from _costs(records, name)


def what(name: str) -> str:
    """Returns a line about a detector."""
    if name in rivals.VARIANTS:
        return rivals.VARIANTS[name].what
    return RIVALS[name].what if name in RIVALS else "the whole detector"


def _triples(cases: Sequence[Mapping], name: str) -> np.ndarray:
    return np.array([triple(c, c["said"][name]) for c in cases]).reshape(-1, 3)


def _overall(cases: Sequence[Mapping], names: Sequence[str], seed: int) -> Iterator[Row]:
    if not cases:
        return
    times_BX = resampled([c["size"] for c in cases], seed)
    ours = _triples(cases, OURS) if OURS in names else None
    for name in names:
        triples = _triples(cases, name)
        row = {"part": "overall", "detector": name, "what": what(name)} | summary(triples, times_BX)
        if ours is not None and name != OURS:
            row |= difference(ours, triples, times_BX)
        row["delay_s"] = delays([d for _, d in _named(cases, name) if d is not None])
        yield row


def _named(cases: Sequence[Mapping], name: str) -> Iterator[tuple[Mapping, float | None]]:
    """Yields each fault and its delay."""
    for case in cases:
        named = judged(case, case["said"][name])["named"]
        yield from zip(case["faults"], named, strict=True)


def _kinds(cases: Sequence[Mapping], name: str) -> Iterator[Row]:
    """Yields the recall by kind of fault, and of faults that slow the job or stop it."""
    every = list(_named(cases, name))
    tests: dict[str, Callable[[Mapping], bool]] = {
        kind: lambda f, kind=kind: f["kind"] == kind
        for kind in dict.fromkeys(f["kind"] for f, _ in every)
    }
    tests |= {
        "(slows the job)": lambda f: 0 < f["speed"] < 1,
        "(stops the job)": lambda f: f["speed"] == 0,
        "(neither)": lambda f: f["speed"] == 1,
    }
    for kind, test in tests.items():
        faults = [(f, d) for f, d in every if test(f)]
        if not faults:
            continue
        hits = [d for _, d in faults if d is not None]
        before = sum(d is not None and f["start"] + d <= f["end"] for f, d in faults)
        yield {
            "part": "kind",
            "detector": name,
            "kind": kind,
            "faults": len(faults),
            "named": len(hits),
            "before_halt": before,
            "recall": len(hits) / len(faults),
            "recall_95": wilson(len(hits), len(faults)),
            "delay_s": delays(hits),
        }


def _alarms(healthy: Sequence[Mapping], name: str) -> Iterator[Row]:
    seen = [c for c in healthy if name in c["said"]]
    if seen:
        vain = sum(triple(c, c["said"][name])[1] for c in seen)
        days = sum(c["seconds"] for c in seen) / 86400
        yield {
            "part": "alarms",
            "detector": name,
            "machines": seen[0]["size"],
            "jobs": len(seen),
        } | rate(vain, days)


def _costs(records: Sequence[Mapping], name: str) -> Iterator[Row]:
    for size in sorted({c["size"] for c in records}):
        chosen = [c for c in records if c["size"] == size and name in c["took"]]
        if chosen:
            each = [1000 * c["took"][name] / c["seconds"] for c in chosen]
            # CPU time of a process of one thread
            yield {
                "part": "cost",
                "detector": name,
                "size": size,
                "ms_a_second_of_data": float(np.median(each)),
            }
