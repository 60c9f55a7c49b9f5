"""Runs detectors on the cases of an evaluation; keeps what is done, case by case.

A case is made once for all detectors. What they said of it is in a file of its own, under a key
that changes with a detector's code, fit and threshold, so the same command goes on after a stop and
a new version of one detector runs that one alone.
"""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reports import minder_rivals
from experiments.reports.minder_counts import triple
from experiments.reports.minder_rivals import ours
from experiments.reports.minder_rivals.rivals import Tuned, tune
from experiments.reports.minder_rivals.view import View
from megajax.monitor.fleet import Case, cases
from megajax.systems import minder
from megajax.systems.minder import Detector

OURS = "ours"
FIT_SIZES, TUNE_SIZES = (8, 16, 64), (4, 16, 64, 256)
HEALTHY = 1024  # machines of a long healthy run
HOURS = 1.0  # of one such run
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
        """Of its file."""
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


def code(*packages: Any) -> str:
    """Returns a hash of the sources of packages."""
    files = [p for package in packages for p in Path(package.__path__[0]).glob("*.py")]
    return _hash(*(p.read_bytes() for p in sorted(files)))


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return digest.hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Made:
    """A detector that is ready: its name, its files, its key. base: the file of our detector, whose
    ranges and networks the rivals share."""

    name: str
    path: Path
    base: Path
    key: str


def sources(jobs: int, seed: int) -> Iterator[Case]:
    """Yields the jobs to fit on: mostly healthy, without labels."""
    yield from cases(jobs, FIT_SIZES, seed, split="train", healthy=0.8)


def fitted(folder: Path, jobs: int, seed: int, steps: int, model: str, tell: Any) -> Path:
    """Returns the file of our detector, fitted now or before, or the one that was given."""
    if model:
        return Path(model)
    path = folder / f"ours-{_hash(jobs, seed, steps, code(minder))}.npz"
    if not path.exists():
        tell(f"fitting our detector on {jobs} jobs")
        grids = [case.read() for case in sources(jobs, seed)]
        Detector.fit(grids, seed=0, steps=steps).save(path)
    return path


def ready(
    names: Sequence[str], folder: Path, base: Path, jobs: int, seed: int, steps: int,
    tune_cases: int, tune_seed: int, tell: Any,
) -> list[Made]:  # fmt: skip
    """Returns the detectors, rivals learnt and tuned now or before."""
    own = _hash(base.read_bytes())
    made = [Made(OURS, base, base, f"{OURS}-{_hash(own, code(minder))}")] * (OURS in names)
    common = _hash(own, code(minder_rivals), jobs, seed, steps, tune_cases, tune_seed)
    rivals = [n for n in names if n != OURS]
    paths = {name: folder / f"{name}-{common}.npz" for name in rivals}
    if new := [name for name in rivals if not paths[name].exists()]:
        tell(f"fitting and tuning {', '.join(new)}")
        profile = Detector.load(base).profile
        learn = [View(c.read(), c.fleet.departures, profile) for c in sources(jobs, seed)]
        drawn = list(cases(tune_cases, TUNE_SIZES, tune_seed, split="validate"))
        views = (View(c.read(), c.fleet.departures, profile) for c in drawn)
        facts = [described(Item("validate", tune_seed, "evaluation", 0, 0), c) for c in drawn]

        def counted(number: int, said: Sequence[Any]) -> tuple[int, int, int]:
            return triple(facts[number], [one._asdict() for one in said])

        for one in tune(new, learn, views, counted, seed, steps):
            one.save(paths[one.name])
            tell(f"{one.name}: F1 {one.f1:.3f} on the tuning cases, {dict(one.tuned)}")
    made += [Made(n, p, base, f"{n}-{_hash(p.read_bytes())}") for n, p in paths.items()]
    return made


# ---- runs


def run(folder: Path, wanted: Sequence[Item], made: Sequence[Made], tell: Any) -> None:
    """Runs what is missing; a case's file is written as soon as all detectors have seen it."""
    rivals = {one.key: Tuned.load(one.path) for one in made if one.name != OURS}
    profile = Detector.load(made[0].base).profile if made else None
    for number, item in enumerate(wanted):
        path = folder / f"{item.name}.json"
        kept = json.loads(path.read_text()) if path.exists() else None
        missing = [one for one in made if kept is None or one.key not in kept["said"]]
        if not missing:
            continue
        case = item.case()
        kept = kept or described(item, case) | {"said": {}, "took": {}}
        assert profile is not None
        began = time.perf_counter()
        view = View(case.read(), case.fleet.departures, profile)
        kept["took"]["read"] = time.perf_counter() - began
        for one in missing:
            began = time.perf_counter()
            if one.name == OURS:
                said = ours.alerts(one.path, view.grid, view.departures)
            else:
                said = rivals[one.key].alerts(view)
            kept["took"][one.key] = time.perf_counter() - began
            kept["said"][one.key] = [alert._asdict() for alert in said]
        part = path.with_suffix(".part")
        part.write_text(json.dumps(kept, default=float))
        part.replace(path)
        tell(f"{number + 1}/{len(wanted)} {item.name}")


def found(folder: Path, wanted: Sequence[Item], made: Sequence[Made]) -> Iterator[Mapping]:
    """Yields what is there: a case, with 'said' and 'took' by the detectors' names."""
    for item in wanted:
        path = folder / f"{item.name}.json"
        if not path.exists():
            continue
        kept = json.loads(path.read_text())
        for member in ("said", "took"):
            kept[member] = {o.name: kept[member][o.key] for o in made if o.key in kept[member]}
        yield kept


def _share(folder: Path, wanted: Sequence[Item], made: Sequence[Made]) -> None:
    """A process's work; prints what is done."""
    run(folder, wanted, made, lambda line: print(line, flush=True))


def shared(
    folder: Path, wanted: Sequence[Item], made: Sequence[Made], processes: int, tell: Any
) -> None:
    """Runs what is missing in several processes, each with one thread of XLA and of BLAS."""
    missing = [item for item in wanted if not done(folder, item, made)]
    if processes == 1 or len(missing) < 2:
        run(folder, missing, made, tell)
        return
    import multiprocessing
    import os

    one = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
           "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    before = {name: os.environ.get(name) for name in one}
    context = multiprocessing.get_context("spawn")
    workers = []
    try:
        os.environ.update(one)  # a process reads them when it starts
        for k in range(processes):
            work = missing[k::processes]
            workers.append(context.Process(target=_share, args=(folder, work, made), daemon=True))
            workers[-1].start()
        for worker in workers:
            worker.join()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        for worker in workers:
            worker.kill() if worker.is_alive() else None
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a process of the evaluation failed; its error stands above")


def done(folder: Path, item: Item, made: Sequence[Made]) -> bool:
    """Tells whether all detectors have seen a case."""
    path = folder / f"{item.name}.json"
    return path.exists() and {o.key for o in made} <= json.loads(path.read_text())["said"].keys()


def tuned(made: Sequence[Made]) -> dict[str, Any]:
    """Returns what was chosen for the rivals, and their F1 on the tuning cases."""
    found = [Tuned.load(one.path) for one in made if one.name != OURS]
    return {one.name: {"f1": one.f1} | dict(one.tuned) for one in found}
