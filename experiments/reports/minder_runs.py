"""Runs detectors on the cases of an evaluation; keeps what is done, case by case.

A case is made once for all detectors. What they said of it is in a file of its own, under a key
that changes with a detector's code, fit and threshold, so the same command goes on after a stop and
a new version of one detector runs that one alone.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.reports import minder_rivals
from experiments.reports.minder_counts import triple
from experiments.reports.minder_rivals import ablated, ours
from experiments.reports.minder_rivals.rivals import RIVALS, Tuned, tune
from experiments.reports.minder_rivals.view import Base, View
from megajax.monitor.fleet import Case, cases
from megajax.systems import minder
from megajax.systems.minder import Detector

OURS = "ours"
FIT_SIZES, TUNE_SIZES = (8, 16, 64), (4, 16, 64, 256)
HEALTHY = 1024  # machines of a long healthy run
HOURS = 1.0  # of one such run
HEALTHY_TOO = (OURS, "minder-paper", "median")  # detectors that see them: they take long
# The modules on which alerts depend; others tell of them, or run the detector.
DETECTS = {"detector", "dynamics", "edges", "evidence", "features", "fit", "judge", "medians",
           "onsets", "pending", "profile", "settings", "tracker", "training"}  # fmt: skip
MIXES_APART = 1000  # between the seeds of two mixes


@dataclasses.dataclass(frozen=True)
class Item:
    """One case: the k-th of its size and mix. mix '': a long healthy run."""

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
        """Returns it."""
        if not self.mix:
            found = _nth(self.k, self.size, self.seed, split=self.split, healthy=1.0)
            return dataclasses.replace(found, end=found.start + int(3600 * HOURS))
        return _nth(self.k, self.size, self.seed, split=self.split, mix=self.mix)


def _nth(k: int, size: int, seed: int, **how: Any) -> Case:
    return next(itertools.islice(cases(k + 1, size, seed, **how), k, None))


def items(
    split: str, seed: int, sizes: Sequence[int], counts: Sequence[int], mixes: Sequence[str],
    hours: float,
) -> list[Item]:  # fmt: skip
    """Returns the cases, small and large ones in turn; the first mix has half of each size's, or
    all if it is the only one."""
    found = []
    for size, count in zip(sizes, counts, strict=True):
        rest = mixes[1:]
        each = count // 2 // max(len(rest), 1) if rest else 0
        shares = {mixes[0]: count - each * len(rest)} | dict.fromkeys(rest, each)
        for number, (mix, share) in enumerate(shares.items()):
            own = seed + number * MIXES_APART
            found += [(k / max(share, 1), Item(split, own, mix, size, k)) for k in range(share)]
    runs = int(hours / HOURS)
    found += [(k / runs, Item(split, seed + 1, "", HEALTHY, k)) for k in range(runs)]
    return [item for _, item in sorted(found, key=lambda x: x[0])]


def described(item: Item, case: Case) -> dict[str, Any]:
    """Returns what a case is, as its file holds it."""
    return {
        **dataclasses.asdict(item), "noise": case.noise, "seconds": case.end - case.start,
        "faults": [
            {"machine": f.machine, "kind": f.kind, "start": f.start, "end": f.end, "speed": f.speed}
            for f in case.faults
        ],
        "left": [list(one) for one in case.fleet.departures],
    }  # fmt: skip


# ---- detectors


def code() -> str:
    """Returns a hash of our detector's sources."""
    files = [p for p in Path(minder.__path__[0]).glob("*.py") if p.stem in DETECTS]
    return _hash(*(p.read_bytes() for p in sorted(files)))


def code_of_rivals() -> str:
    """Returns a hash of the rivals' sources."""
    files = sorted(Path(minder_rivals.__path__[0]).glob("*.py"))
    return _hash(*(p.read_bytes() for p in files if p.stem not in ("ablated", "ours")))


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
    """What detectors learn from. jobs, seed: to fit on. steps: of training a network. tune_cases,
    tune_seed: validation cases on which the rivals are tuned."""

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
    """Returns the file of what the rivals share, from the first model of a recipe."""
    path = folder / f"base-{_hash(recipe.jobs, recipe.seed, recipe.steps)}.npz"
    if not path.exists():
        Base.of(Detector.load(model)).save(path)
    return path


def ready(names: Sequence[str], folder: Path, model: Path, recipe: Recipe, tell: Any) -> list[Made]:
    """Returns the detectors, rivals learnt and tuned now or before."""
    own = _hash(model.read_bytes())
    made = [Made(OURS, model, f"{OURS}-{_hash(own, code())}")] * (OURS in names)
    base = base_of(folder, model, recipe)
    shared, common = Base.load(base), _hash(base.read_bytes(), code_of_rivals(), recipe)
    rivals = [n for n in names if n in RIVALS]
    for name in (n for n in names if n in ablated.VARIANTS):
        key = _hash(name, own, code(), code_of_rivals(), recipe)
        path = folder / f"{name}-{key}.npz"
        if not path.exists():
            tell(f"fitting {name}: {ablated.VARIANTS[name].what}")
            ablated.fit(name, model, list(recipe.sources()), recipe.steps, path)
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


def run(folder: Path, wanted: Sequence[Item], made: Sequence[Made], base: Path, tell: Any) -> None:
    """Runs what is missing; a case's file is written as soon as all detectors have seen it."""
    rivals = {one.key: Tuned.load(one.path) for one in made if one.name in RIVALS}
    shared = Base.load(base)
    for number, item in enumerate(wanted):
        path = folder / f"{item.name}.json"
        kept = json.loads(path.read_text()) if path.exists() else None
        missing = [o for o in asked(item, made) if kept is None or o.key not in kept["said"]]
        if not missing:
            continue
        case = item.case()
        kept = kept or described(item, case) | {"said": {}, "took": {}}
        began = time.process_time()
        view = View(case.read(), case.fleet.departures, shared)
        kept["took"]["read"] = time.process_time() - began
        for one in missing:
            began = time.process_time()
            if one.name == OURS:
                said = ours.alerts(one.path, view.grid, view.departures)
            elif one.name in ablated.VARIANTS:
                said = ablated.alerts(one.name, one.path, case)
            else:
                said = rivals[one.key].alerts(view)
            kept["took"][one.key] = time.process_time() - began
            kept["said"][one.key] = [alert._asdict() for alert in said]
        part = path.with_suffix(".part")
        part.write_text(json.dumps(kept, default=float))
        part.replace(path)
        tell(f"{number + 1}/{len(wanted)} {item.name}")


def found(folder: Path, wanted: Sequence[Item], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields what is there: a case, with 'said' and 'took' by the detectors' names, of each the one
    that ran last."""
    for item in wanted:
        path = folder / f"{item.name}.json"
        if not path.exists():
            continue
        kept = json.loads(path.read_text())
        last = {key.rpartition("-")[0]: key for key in kept["said"]}  # in the order of running
        for member in ("said", "took"):
            kept[member] = {n: kept[member][last[n]] for n in names if n in last}
        yield kept


ALONE = (  # one thread of XLA and of BLAS
    "XLA_FLAGS=--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OPENBLAS_NUM_THREADS=1",
    "OMP_NUM_THREADS=1",
)


def shared(
    folder: Path, wanted: Sequence[Item], made: Sequence[Made], base: Path, processes: int,
    tell: Any,
) -> None:  # fmt: skip
    """Runs what is missing in several processes, each of one thread."""
    missing = [item for item in wanted if not done(folder, item, made)]
    if processes == 1 or len(missing) < 2:
        run(folder, missing, made, base, tell)
        return
    workers = []
    try:
        for k in range(processes):
            work = folder / f"work-{k}.json"
            work.write_text(_written(missing[k::processes], made, base))
            program = [sys.executable, "-m", "experiments.reports.minder_runs", str(work)]
            workers.append(subprocess.Popen(["env", *ALONE, *program]))
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.terminate()
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a process of the evaluation failed; its error stands above")


def _written(wanted: Sequence[Item], made: Sequence[Made], base: Path) -> str:
    """Returns the work of a process as JSON."""
    return json.dumps(
        {"items": [dataclasses.asdict(i) for i in wanted],
         "made": [dataclasses.asdict(m) for m in made], "base": base},
        default=str,
    )  # fmt: skip


def main(path: str) -> None:
    """Does the work of a file that `shared` wrote; prints what is done."""
    work = json.loads(Path(path).read_text())
    made = [Made(m["name"], Path(m["path"]), m["key"]) for m in work["made"]]
    wanted = [Item(**item) for item in work["items"]]
    tell = functools.partial(print, flush=True)
    run(Path(path).parent, wanted, made, Path(work["base"]), tell)


def done(folder: Path, item: Item, made: Sequence[Made]) -> bool:
    """Tells whether all detectors have seen a case."""
    path = folder / f"{item.name}.json"
    wanted = {one.key for one in asked(item, made)}
    return path.exists() and wanted <= json.loads(path.read_text())["said"].keys()


def asked(item: Item, made: Sequence[Made]) -> list[Made]:
    """Returns the detectors that see a case."""
    return [one for one in made if item.mix or one.name in HEALTHY_TOO]


def tuned(folder: Path, made: Sequence[Made]) -> dict[str, Any]:
    """Returns what was chosen for the rivals, now or before, and their F1 on the tuning cases."""
    path = folder / "tuned.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    new = [Tuned.load(one.path) for one in made if one.name in RIVALS]
    kept |= {one.name: {"f1": one.f1} | dict(one.tuned) for one in new}
    path.write_text(json.dumps(kept, indent=1))
    return kept


if __name__ == "__main__":
    main(sys.argv[1])
