"""CDMPP: splits of measured rows, errors of a cost model in every split, a predicted step, tables.

Errors are absolute errors relative to the measured time; a split also reports how many of its
measured times lie in the predicted 90 % band, and the noise floor of its labels where both halves
are known. Figures of several seeds are averaged.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy.optimize import nnls

from experiments.reports.reporting import (
    Columns,
    Row,
    markdown_table,
    read,
    rows_of,
    rows_table,
    source,
    table,
)
from megajax.core.errors import UserError, did_you_mean
from megajax.core.hardware import Cluster, DeviceCard
from megajax.cost.base import mfu, train_flops_per_token
from megajax.cost.program import records
from megajax.cost.record import OpRecord
from megajax.monitor import results
from megajax.systems.aot import RESERVE_BYTES
from megajax.systems.cdmpp import choose, families
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.families import SYNTHETIC
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.profile import NOISY, compile_program
from megajax.systems.cdmpp.step import StepTime
from megajax.training.config import Config

# ---- splits
#
# Divides measured rows into those to fit on and those to judge on.
#
# Splits never cut a program in two: rows of one structural hash are on one side. Rows of synthetic
# programs (families.SYNTHETIC) are fitted on and never judged.


FAMILY_FOLDS = 4
NAMES = ("random", "families", "devices")


@dataclasses.dataclass(frozen=True)
class Split:
    """Indices of the rows to fit on, to judge on and to adapt to. part: what is held out."""

    name: str
    part: str
    fit: np.ndarray
    judge: np.ndarray
    adapt: np.ndarray | None = None


def unique_rows(dataset: Dataset) -> np.ndarray:
    """Returns the first labelled row of each (structural hash, device)."""
    seen: dict[tuple[str, str], int] = {}
    for row, (record, device) in enumerate(zip(dataset.records, dataset.devices, strict=True)):
        if not np.isnan(dataset.seconds[row]):
            seen.setdefault((record.hash, device), row)
    return np.array(list(seen.values()), int)


def random_split(dataset: Dataset, rows: np.ndarray, seed: int) -> Split:
    """Returns a split that holds out a fifth of the programs' hashes, on all devices."""
    hashes = sorted({dataset.records[i].hash for i in rows})
    held = set(np.random.default_rng(seed).permutation(hashes)[: max(len(hashes) // 5, 1)])
    is_held = np.array([dataset.records[i].hash in held for i in rows], bool)
    return Split("random", "a fifth", rows[~is_held], rows[is_held])


def family_splits(
    dataset: Dataset, rows: np.ndarray, families: np.ndarray, seed: int
) -> Iterator[Split]:
    """Yields a split for each group of families, which is held out; programs that also occur in
    other families are not fitted on."""
    names = np.random.default_rng(seed).permutation(sorted(set(families[rows].tolist())))
    for held in np.array_split(names, min(FAMILY_FOLDS, len(names))):
        is_held = np.isin(families[rows], held)
        judged = {dataset.records[i].hash for i in rows[is_held]}
        is_free = np.array([dataset.records[i].hash not in judged for i in rows], bool)
        yield Split("families", ", ".join(held), rows[~is_held & is_free], rows[is_held])


def with_more(dataset: Dataset, split: Split, more: np.ndarray) -> Split:
    """Returns a split that also fits rows which no split judges (families.SYNTHETIC).

    It leaves out rows of devices that the split does not fit on, and rows of structures that it
    judges.
    """
    devices = {dataset.devices[i] for i in split.fit}
    judged = {dataset.records[i].hash for i in split.judge}
    free = [
        i for i in more if dataset.devices[i] in devices and dataset.records[i].hash not in judged
    ]
    return dataclasses.replace(split, fit=np.concatenate([split.fit, np.array(free, int)]))


def device_splits(
    dataset: Dataset,
    rows: np.ndarray,
    shots: int,
    seed: int,
    held_out: Collection[str] | None = None,
    programs: np.ndarray | None = None,
) -> Iterator[Split]:
    """Yields splits that hold devices out: without rows of the device, and with those of `shots`
    programs.

    Args: held_out: devices of which no fit has a row; None: each device in turn. programs: the
    number of each row's program; None: each row is a program.
    """
    names = np.array([dataset.devices[i] for i in rows])
    for name in sorted(set(names.tolist()) if held_out is None else held_out):
        out = [name] if held_out is None else list(held_out)
        fit, other = rows[~np.isin(names, out)], rows[names == name]
        if not len(fit):
            continue
        split = Split("devices", name, fit, other)
        yield split
        yield shown(dataset, split, shots, seed, programs)


def shown(
    dataset: Dataset, split: Split, shots: int, seed: int, programs: np.ndarray | None = None
) -> Split:
    """Returns the split with the rows of `shots` chosen programs to adapt to.

    Rows with a structural hash of these programs are not judged.
    """
    count = min(shots, len(split.judge) - 1)
    picked = np.zeros(len(split.judge), bool)
    if count > 0:
        picked[choose(dataset[split.judge], count, seed=seed)] = True
    if programs is not None and count > 0:
        device = dataset.devices[split.judge[0]]
        chosen = set(programs[split.judge[picked]].tolist())
        others = sorted(set(programs[split.judge].tolist()) - chosen)  # some have two rows picked
        rng = np.random.default_rng(seed)
        chosen.update(rng.permutation(np.array(others, int))[: count - len(chosen)].tolist())
        seen = {
            record.hash
            for record, name, number in zip(dataset.records, dataset.devices, programs, strict=True)
            if name == device and number in chosen
        }
        picked = np.array([dataset.records[i].hash in seen for i in split.judge], bool)
    return dataclasses.replace(
        split,
        name=f"{split.name}, {count} programs seen",
        judge=split.judge[~picked],
        adapt=split.judge[picked],
    )


@dataclasses.dataclass(frozen=True)
class SplitChoice:
    """A choice of splits.

    names: kinds of splits, some of NAMES. held_out: devices of which no fit has a row; None: each
    device in turn. shots: number of programs of a held-out device to which a predictor is adapted.
    seed: random seed of the splits; that of the choice of programs is another one.
    """

    names: tuple[str, ...]
    held_out: Collection[str] | None
    shots: int
    seed: int

    def __post_init__(self) -> None:
        """Checks the names. Raises: UserError."""
        for name in self.names:
            if name not in NAMES:
                raise UserError(f"splits={name} must be random, families or devices (--splits)")

    def of(
        self, dataset: Dataset, rows: np.ndarray, labels: Labels | None, seed: int
    ) -> list[Split]:
        """Returns the splits of these rows.

        Args: labels: the families and programs of all rows; None: unknown, so there is no split by
        families. seed: random seed of the programs to adapt to. Raises: UserError on an unknown
        device, and if all programs are synthetic.
        """
        families = None if labels is None else labels.families
        programs = None if labels is None else labels.programs
        is_real = np.ones(len(rows), bool)
        if families is not None:
            is_real = ~np.isin(families[rows], list(SYNTHETIC))
        real, more = rows[is_real], rows[~is_real]
        if len(more) and not len(real):
            raise UserError(
                "the data has only synthetic programs, which no split judges; give labels of real "
                "programs, too (--data=REAL.npz,SYNTHETIC.npz)"
            )
        splits: list[Split] = []
        for name in self.names:
            if name == "random":
                splits.append(random_split(dataset, real, self.seed))
            elif name == "families" and families is not None:
                splits += family_splits(dataset, real, families, self.seed)
            elif name == "devices":
                for unknown in sorted(set(self.held_out or ()) - set(dataset.devices)):
                    near = did_you_mean(unknown, dataset.devices)
                    raise UserError(
                        f"held_out={unknown} is no device of the data.{near} (--held_out)"
                    )
                splits += device_splits(dataset, real, self.shots, seed, self.held_out, programs)
        return [with_more(dataset, split, more) for split in splits] if len(more) else splits


# ---- errors


BAND = 1.645  # standard deviations of a 90 % band
PAPER = {"families": 14.03, "devices": 10.85}  # CDMPP abstract: cross-model, cross-device, percent
QUIET = "halves within 10 %"  # rows that the profile did not mark (NOISY)
FAMILY = "family "  # before the name of a family that is judged alone
EACH = "each in turn"  # all parts of a split together


class Model(Protocol):
    """What is judged: anything that predicts seconds."""

    def predict(  # noqa: D102
        self, records: Sequence[OpRecord], card: DeviceCard
    ) -> tuple[np.ndarray, np.ndarray]: ...


Fit = Callable[[Dataset], Any]


def repeats(dataset: Dataset) -> Row:
    """Returns by how many percent rows of one structure and device differ from their median.

    No predictor of single instructions can have smaller errors on such rows. Only groups of three
    rows or more count.
    """
    keys: dict[tuple[str, str], list[float]] = {}
    for record, device, seconds in zip(
        dataset.records, dataset.devices, dataset.seconds, strict=True
    ):
        keys.setdefault((record.hash, device), []).append(seconds)
    many = [np.array(times) for times in keys.values() if len(times) >= 3]
    if not many:
        return {}
    apart = 100 * np.concatenate([np.abs(times / np.median(times) - 1) for times in many])
    return {
        "repeats": len(many),
        "repeats_mean": float(apart.mean()),
        "repeats_median": float(np.median(apart)),
    }


def evaluate(
    dataset: Dataset,
    splits: Sequence[Split],
    methods: Mapping[str, Fit],
    halves: np.ndarray | None = None,
    tell: Callable[[str], None] = print,
    groups: np.ndarray | None = None,
    after: Callable[[str, Split, Any], None] = lambda *_: None,
    families: np.ndarray | None = None,
) -> list[Row]:
    """Returns a row for each split and method, and for each group of records in it.

    A method is fitted once for equal rows. Splits of one name are also judged together.

    Args: halves: (rows, 2) seconds, where the labels' noise is known. groups: a name a row; None:
        the records' kinds. after: is called with each method, split and fitted model. families: a
        name a row; where whole families are held out, each is also judged alone.
    """
    rows: list[Row] = []
    for name, fit in methods.items():
        fitted: dict[bytes, Any] = {}
        parts: dict[str, list[tuple[np.ndarray, ...]]] = {}
        for split in splits:
            key = split.fit.tobytes()
            if key not in fitted:
                fitted = {key: fit(dataset[split.fit])}  # the newest only: a fit may be large
            model = fitted[key]
            if split.adapt is not None and len(split.adapt):
                model = model.adapt(dataset[split.adapt])
            about = {"method": name, "split": split.name, "held_out": split.part}
            unseen = getattr(model, "unseen", lambda records: [])
            if missing := unseen([dataset.records[i] for i in split.judge]):
                about["fitted_on_all_kinds"] = ", ".join(missing)
            part = (split.judge, *predicted(dataset, split.judge, model))
            parts.setdefault(split.name, []).append(part)
            new = [about | row for row in grouped(dataset, *part, halves, groups)]
            rows += new
            tell(text(new[0]))
            after(name, split, model)
        for split_name, pieces in parts.items():
            if len(pieces) > 1:
                judged, seconds, sigma = (
                    np.concatenate(column) for column in zip(*pieces, strict=True)
                )
                about = {"method": name, "split": split_name, "held_out": EACH}
                total = grouped(dataset, judged, seconds, sigma, halves, groups)
                if families is not None and split_name == "families":
                    each = grouped(dataset, judged, seconds, sigma, halves, families)
                    total += [
                        row | {"group": FAMILY + row["group"]}
                        for row in each
                        if row["group"] not in ("all", QUIET)
                    ]
                new = [about | row for row in total]
                rows += new
                tell(text(new[0]))
    return rows


def judge(dataset: Dataset, split: Split, model: Model, halves: np.ndarray | None) -> list[Row]:
    """Returns the errors on all rows of a split, then those of each kind of record."""
    return grouped(dataset, split.judge, *predicted(dataset, split.judge, model), halves)


def predicted(dataset: Dataset, rows: np.ndarray, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Returns (seconds, sigma) of these rows."""
    devices = np.array([dataset.devices[i] for i in rows])
    seconds, sigma = np.zeros(len(rows)), np.zeros(len(rows))
    for device in sorted(set(devices.tolist())):
        is_device = devices == device
        records = [dataset.records[i] for i in rows[is_device]]
        seconds[is_device], sigma[is_device] = model.predict(records, dataset.cards[device])
    return seconds, sigma


def grouped(
    dataset: Dataset,
    rows: np.ndarray,
    predicted_s: np.ndarray,
    sigma: np.ndarray,
    halves: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> list[Row]:
    """Returns the errors of predictions of these rows, then those of each group of them."""
    seconds = dataset.seconds[rows]
    if groups is None:
        groups = np.array([record.kind for record in dataset.records])
    names = groups[rows]
    noise = None if halves is None else halves[rows]
    everything = np.ones(len(seconds), bool)
    out = [{"group": "all", **errors(predicted_s, sigma, seconds, noise, everything)}]
    if noise is not None:
        is_quiet = np.ptp(noise, 1) <= NOISY * noise.min(1)
        if is_quiet.any():
            out.append({"group": QUIET, **errors(predicted_s, sigma, seconds, noise, is_quiet)})
    for name in sorted(set(names.tolist())):
        out.append({"group": name, **errors(predicted_s, sigma, seconds, noise, names == name)})
    return out


def errors(
    predicted: np.ndarray,
    sigma: np.ndarray,
    seconds: np.ndarray,
    halves: np.ndarray | None,
    is_counted: np.ndarray,
) -> Row:
    """Returns the relative errors of some rows in percent, and the labels' own disagreement.

    mean, median, p90: over the rows. weighted: error of the seconds divided by their sum. in_band:
    the share of rows in the 90 % band, where there is one.
    """
    apart = np.abs(predicted - seconds)[is_counted]
    relative = 100 * apart / seconds[is_counted]
    row = {
        "rows": int(is_counted.sum()),
        "mean": float(relative.mean()),
        "median": float(np.median(relative)),
        "p90": float(np.percentile(relative, 90)),
        "weighted": float(100 * apart.sum() / seconds[is_counted].sum()),
    }
    if not np.isnan(sigma[is_counted]).any():
        row["in_band"] = float((apart <= BAND * sigma[is_counted]).mean())
    if halves is not None:
        noise = 100 * np.ptp(halves[is_counted], 1) / halves[is_counted].min(1)
        row |= {"noise_mean": float(noise.mean()), "noise_median": float(np.median(noise))}
    return row


def averaged(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns the rows of several seeds as one: means, and the least and largest mean error."""
    rows_by_key: dict[tuple, list[Row]] = {}
    for row in itertools.chain(*runs):
        key = tuple(row[name] for name in ("method", "split", "held_out", "group"))
        rows_by_key.setdefault(key, []).append(row)
    out = []
    for rows in rows_by_key.values():
        one = dict(rows[0])
        for name, value in rows[0].items():
            if isinstance(value, float):
                one[name] = float(f"{np.mean([row[name] for row in rows]):.5g}")
        means = [row["mean"] for row in rows]
        spread = {"seeds": len(rows), "mean_low": min(means), "mean_high": max(means)}
        out.append(one | {k: float(f"{v:.5g}") if k != "seeds" else v for k, v in spread.items()})
    return out


def text(row: Row) -> str:
    """Returns a line for the terminal."""
    line = (
        f"{row['method']:16} {row['split']:26} {row['held_out'][:30]:30} {row['rows']:6} rows  "
        f"error {row['mean']:.1f} % (mean), {row['median']:.1f} % (median)"
    )
    if "in_band" in row:
        line += f"; {100 * row['in_band']:.0f} % in the 90 % band"
    if "noise_mean" in row:
        line += f"; labels differ by {row['noise_mean']:.1f} %"
    if "fitted_on_all_kinds" in row:
        line += f"; no row of kind {row['fitted_on_all_kinds']} to fit on"
    return line


def summary(rows: Sequence[Row]) -> str:
    """Returns a table of all splits and methods, all groups together."""
    columns: Columns = {
        "split": "split",
        "held out": "held_out",
        "method": "method",
        "rows": "rows",
        "mean %": lambda r: f"{r['mean']:.1f}",
        "median %": lambda r: f"{r['median']:.1f}",
        "p90 %": lambda r: f"{r['p90']:.1f}",
        "of the sum %": lambda r: f"{r['weighted']:.1f}",
        "in band %": lambda r: f"{100 * r['in_band']:.0f}" if "in_band" in r else None,
        "noise %": lambda r: f"{r['noise_mean']:.1f}" if "noise_mean" in r else None,
        "paper %": lambda r: PAPER.get(r["split"].split(",")[0]),
    }
    return rows_table([row for row in rows if row["group"] == "all"], columns)


def rows_before(path: Path) -> dict[str, Any]:
    """Returns what a file of an earlier evaluation holds; {} if there is none.

    Raises: UserError if it holds something else, which this evaluation would overwrite.
    """
    if not path.exists():
        return {}
    try:
        evaluation: Any = read(path)
    except (OSError, ValueError):
        evaluation = None
    if not isinstance(evaluation, dict) or not isinstance(evaluation.get("rows"), list):
        raise UserError(f"{path} is no evaluation; remove it or name another file (--json)")
    return evaluation


def not_rerun(
    before: Mapping[str, Any], about: Mapping[str, Any], new_rows: list[Any]
) -> list[Any]:
    """Returns the rows of the same data by methods or in splits that were not run now."""
    same = all(before.get(name) == about[name] for name in ("data", "rows_unique", "shots"))
    new = {(row["method"], row["split"]) for row in new_rows}
    rows = before.get("rows", ()) if same else ()
    return [row for row in rows if (row["method"], row["split"]) not in new]


# ---- whole calls
#
# Calls of whole programs: sums of predicted instructions beside XLA's own counts of the program.
#
# XLA's analysis (`compiled.cost_analysis()`) covers a whole module, and on a CPU it counts FLOPs,
# bytes and transcendentals without a time. The rival made from it is a roofline with fitted
# weights. All methods predict the time of a call as measured from outside. The weights of each
# method, for a constant and for its sums, are fitted on the calls of the same other families: they
# are not negative and have the least squared relative error.


GROUP = "whole calls"
_COUNTED = ("flops", "bytes accessed", "transcendentals")
_LAUNCH = 1e-5  # seconds; scales the constant, whose weight is fitted


def xla_counts(labels: Labels, numbers: Iterable[int]) -> dict[int, np.ndarray]:
    """Returns {program: XLA's counts of FLOPs, bytes and transcendentals}.

    The programs are compiled again, from the seed in the labels' facts (0 if there is none).
    Raises: UserError if the labels are of other programs.
    """
    counts, seed = {}, int(labels.dataset.facts.get("seed", 0))
    for number in numbers:
        rows = np.flatnonzero(labels.programs == number).tolist()
        family = str(labels.families[rows[0]])  # the labels may be older than some families
        compiled = compile_program(families.program(number, (family,), seed=seed))
        hashes = {record.hash for record in records(compiled)}
        if {labels.dataset.records[i].hash for i in rows} - hashes:
            raise UserError(
                f"program {number} has other instructions than its labels: they are of another "
                "--seed, --scale or version"
            )
        said: Any = compiled.cost_analysis() or {}
        counts[number] = np.array([float(said.get(name, 0.0)) for name in _COUNTED])
    return counts


@dataclasses.dataclass(frozen=True)
class Calls:
    """Labelled calls. counts: {program: XLA's counts}; calls of programs that are missing are left
    out."""

    labels: Labels
    counts: Mapping[int, np.ndarray]

    def judge(
        self, splits: Sequence[Split], seconds: Mapping[str, Sequence[np.ndarray]]
    ) -> list[dict[str, Any]]:
        """Returns a row for each method: its errors on the calls of held-out families, over all
        folds.

        Args: splits: one split by families for each fold. seconds: {method: an array for each
            fold}, the predicted times of all rows of the labels.
        """
        names, values, walls, calls_families = self._calls()
        where = {name: np.array([rows for rows in values[name]]) for name in values}
        of_device = np.array([device for device, _ in names])
        judged = []
        sums = {
            name: lambda fold, name=name: self._sum(names, seconds[name][fold]) for name in seconds
        }
        sums |= {name: lambda fold, name=name: where[name] for name in where}
        for method, terms in sums.items():
            predicted, measured = [], []
            for fold, split in enumerate(splits):
                held = np.isin(calls_families, split.part.split(", "))
                for device in sorted(set(of_device.tolist())):
                    is_device = of_device == device
                    work = np.column_stack([np.full(len(is_device), _LAUNCH), terms(fold)])
                    train, test = is_device & ~held, is_device & held
                    weights, _ = nnls(work[train] / walls[train, None], np.ones(train.sum()))
                    predicted.append(work[test] @ weights)
                    measured.append(walls[test])
            both = np.concatenate(predicted), np.concatenate(measured)
            about = {"method": method, "split": "families", "held_out": EACH, "group": GROUP}
            unknown = np.full(len(both[0]), np.nan)
            judged.append(about | errors(both[0], unknown, both[1], None, np.isfinite(both[0])))
        return judged

    def _calls(self) -> tuple[list, dict[str, list[np.ndarray]], np.ndarray, np.ndarray]:
        names, walls, names_families = [], [], []
        values: dict[str, list[np.ndarray]] = {"XLA's counts": [], "our counts": []}
        values["measured instructions"] = []
        for key, rows in self._rows():
            names.append(key)
            walls.append(self.labels.walls[rows[0]].min())
            names_families.append(self.labels.families[rows[0]])
            values["XLA's counts"].append(self.counts[key[1]])
            call = [self.labels.dataset.records[i] for i in rows]
            values["our counts"].append(
                np.sum(
                    [
                        r.executions * np.array([r.flops, r.nbytes, r["transcendentals"]])
                        for r in call
                    ],
                    0,
                )
            )
            times = self.labels.dataset.seconds[rows]
            values["measured instructions"].append(
                np.array([sum(r.executions * s for r, s in zip(call, times, strict=True))])
            )
        return names, values, np.array(walls), np.array(names_families)

    def _rows(self) -> Iterator[tuple[tuple[str, int], np.ndarray]]:
        keys = list(zip(self.labels.dataset.devices, self.labels.programs.tolist(), strict=True))
        places: dict[tuple[str, int], list[int]] = {}
        for row, key in enumerate(keys):
            if key[1] in self.counts:
                places.setdefault(key, []).append(row)
        yield from ((key, np.array(rows)) for key, rows in places.items())

    def _sum(self, names: list, seconds: np.ndarray) -> np.ndarray:
        """Returns the seconds of all executions of each call, (calls, 1)."""
        executions = np.array([record.executions for record in self.labels.dataset.records])
        return np.array([[np.sum((executions * seconds)[rows])] for _, rows in self._rows()])


# ---- a predicted step


TOP = 10


def step_facts(
    step: StepTime,
    cfg: Config,
    cluster: Cluster,
    segments: int = 1,
    band: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Returns the figures of a predicted step, and its dearest operations.

    Args: segments: number of documents of equal length in a row; MFU counts attention inside them
    only. band: ends of the 90 % band as multiples of the step's time; None: computed from its
    deviation.
    """
    low = max(step.seconds - BAND * step.sigma, 0.0) if band is None else band[0] * step.seconds
    high = step.seconds + BAND * step.sigma if band is None else band[1] * step.seconds
    rows, length = cfg.train.global_batch * segments, cfg.train.seq_len // segments
    load = cfg.model.workload(rows, length, cfg.train.dtype)
    tokens_per_s = load.tokens / step.seconds
    peak = cluster.card.peak(cfg.train.dtype)
    flops = {c: train_flops_per_token(load, c) for c in ("megatron", "causal")}
    same: dict[str, list[float]] = {}
    first: dict[str, OpRecord] = {}
    for record, seconds, _ in step.rows:
        first.setdefault(record.hash, record)
        total = same.setdefault(record.hash, [0.0, 0.0])
        total[0] += seconds
        total[1] += record.executions
    dearest = sorted(same, key=lambda key: -same[key][0])[:TOP]
    return {
        "step_s": step.seconds,
        "low_s": low,
        "high_s": high,
        "compute_s": step.compute_s,
        "communication_s": step.communication_s,
        "exposed_s": step.exposed_s,
        "tokens_per_s": tokens_per_s,
        "mfu_megatron": mfu(tokens_per_s, flops["megatron"], cluster.devices, peak),
        "mfu_causal": mfu(tokens_per_s, flops["causal"], cluster.devices, peak),
        "dearest": [
            {
                "name": first[key].name,
                "kind": first[key].kind,
                "executions": same[key][1],
                "seconds": same[key][0],
                "share": same[key][0] / step.seconds if step.seconds else 0.0,
            }
            for key in dearest
        ],
    }


ATTENTION_KERNELS = {
    "xla": "Attention is XLA's.",
    "hopper": "Attention is our Hopper kernel, in the place of cuDNN's.",
}


def write(folder: Path, step: StepTime, facts: Mapping[str, Any], cluster: Cluster) -> None:
    """Writes step.json and step_trace.json, which ui.perfetto.dev opens."""
    about: dict[str, Any] = results.facts(cluster.name, f"compiled for {cluster.card.name}")
    about |= {name: value for name, value in facts.items() if name != "dearest"}
    results.write(folder / "step.json", about, facts["dearest"])
    step.replay.timeline.to_perfetto(folder / "step_trace.json")


def step_markdown(facts: Mapping[str, Any], cluster: Cluster) -> str:
    """Returns the predicted step as text.

    facts: what `step_facts` returns, with the further members memory_bytes, times (the source of
    the times) and attention (the kernel with which the step was compiled).
    """
    lines = [
        f"# A step on {cluster.name}",
        "",
        f"- step: {_time(facts['step_s'])} (90 % band {_time(facts['low_s'])} to "
        f"{_time(facts['high_s'])})",
        f"- compute: {_time(facts['compute_s'])}; communication "
        f"{_time(facts['communication_s'])}, of which {_time(facts['exposed_s'])} is exposed",
        f"- {facts['tokens_per_s']:,.0f} tokens/s, MFU {100 * facts['mfu_megatron']:.1f} % "
        f"(Megatron's convention), {100 * facts['mfu_causal']:.1f} % (causal)",
        f"- memory: {_memory(facts['memory_bytes'], cluster)}",
    ]
    columns: Columns = {
        "operation": "name",
        "kind": "kind",
        "executions": lambda r: f"{r['executions']:g}",
        "time": lambda r: _time(r["seconds"]),
        "of the step": lambda r: f"{100 * r['share']:.1f} %",
    }
    origin = f"{facts['times'].rstrip('.')}. {ATTENTION_KERNELS[facts['attention']]}"
    if (place := facts.get("compiled_for", cluster.card.name)) != cluster.card.name:
        origin += (
            f" It is not compiled for {cluster.card.name}, so the program and its memory are those "
            f"of {place}."
        )
    table = rows_table(facts["dearest"], columns)
    return "\n\n".join(["\n".join(lines), table, f"*Predicted, not measured: {origin}*"])


def _memory(nbytes: float, cluster: Cluster) -> str:
    """Returns the memory that the step needs on a device, by XLA's figure and with the reserve of a
    plan, and whether it fits."""
    need = nbytes + RESERVE_BYTES
    gib, room = need / 2**30, cluster.card.memory_bytes / 2**30
    reserve = f"({RESERVE_BYTES / 2**30:.1f} reserved)"
    if need <= cluster.card.memory_bytes:
        return f"{gib:.1f} of {room:.1f} GiB a device {reserve}"
    return (
        f"{gib:.1f} GiB a device {reserve}, and it has {room:.1f}: this step does not fit, and "
        "XLA's schedule of it may be a worse one; more micro-batches need less "
        "(--train.accumulate)"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3f} ms"


# ---- tables of documents


# Mean errors in percent that NeuSight's repository publishes (scripts/asplos/summary) for devices
# outside of its training: H100, L4 and A100-80 together.
NEUSIGHT = {"bmm": 13.8, "linear": 13.9, "elem": 19.3, "softmax": 13.9, "ln": 56.7}
GROUP_TEXTS = {
    "linear": "linear",
    "bmm": "batched products",
    "elem": "element-wise",
    "softmax": "softmax",
    "ln": "layer norm",
}


def programs(path: Path) -> str:
    """Returns the table of errors on our own programs' instructions, by split and method."""
    result = read(path)
    rows = rows_of(result, group="all")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    splits = list(dict.fromkeys((row["split"], row["held_out"]) for row in rows))
    joined = {name for name, held in splits if held == EACH}
    lines = []
    for split, held in splits:
        if split in joined and held != EACH and split == "families":
            continue
        by_method = {r["method"]: r for r in rows if (r["split"], r["held_out"]) == (split, held)}
        ours = by_method["ours"]
        paper = PAPER.get(split.split(",")[0])
        lines.append(
            (
                f"{split}: {held}",
                f"{ours['rows']:,}",
                *_best(by_method, methods),
                f"{ours['weighted']:.1f}",
                f"{100 * ours['in_band']:.0f}",
                f"{ours['noise_mean']:.1f} / {ours['noise_median']:.1f}",
                "-" if paper is None else paper,
            )
        )
    heads = ("held out", "rows", *methods, "of the sum", "in the band", "labels differ by", "paper")
    text = (
        "Relative errors in %: mean / median; bold: the least mean. The paper's figures are of "
        "other programs and devices. `of the sum`: of ours, weighted by time. `in the band`: "
        "measured times in our 90 % band, in %. `labels differ by`: the two halves of the "
        "measurements. "
        f"Ours: mean of seeds, {rows[0]['seeds']}."
    )
    return "\n\n".join([markdown_table(heads, lines), text, source(result)])


def kinds(path: Path) -> str:
    """Returns the table of our errors by kind of instruction, beside the noise of the labels."""
    result = read(path)
    chosen = [
        row
        for row in rows_of(result, method="ours")
        if row["group"] not in ("all", GROUP)
        and not row["group"].startswith(FAMILY)
        and (row["held_out"] == EACH or row["split"] == "random")
    ]
    splits = list(dict.fromkeys(row["split"] for row in chosen))
    at = {(row["split"], row["group"]): row for row in chosen}
    lines = []
    for name in sorted({row["group"] for row in chosen}):
        by_split = [at.get((split, name)) for split in splits]
        cells = (
            f"{r['mean']:.1f} / {r['median']:.1f} ({r['rows']})" if r else "" for r in by_split
        )
        noise = next(r for r in by_split if r)
        lines.append((name, *cells, f"{noise['noise_mean']:.1f}"))
    table = markdown_table(("kind", *splits, "labels differ by"), lines)
    return "\n\n".join([table, "Relative errors in %: mean / median (rows).", source(result)])


def families_table(path: Path) -> str:
    """Returns the table of errors on each family of programs, held out with the others of its
    group."""
    result = read(path)
    rows = [row for row in result["rows"] if row["group"].startswith(FAMILY)]
    at = {(row["method"], row["group"]): row for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for group in sorted({row["group"] for row in rows}):
        by_method = {method: at[method, group] for method in methods}
        first, best = by_method[methods[0]], _best(by_method, methods)
        noise = f"{first['noise_mean']:.1f}"
        lines.append((group.removeprefix(FAMILY), f"{first['rows']:,}", *best, noise))
    table = markdown_table(("family", "rows", *methods, "labels differ by"), lines)
    text = "Relative errors in %: mean / median; bold: the least mean."
    return "\n\n".join([table, text, source(result)])


def calls(path: Path) -> str:
    """Returns the table of errors on whole calls of held-out families, by what is summed."""
    result = read(path)
    columns: Columns = {
        "a call is predicted from": "method",
        "calls": lambda r: f"{r['rows']:,}",
        "mean %": lambda r: f"{r['mean']:.1f}",
        "median %": lambda r: f"{r['median']:.1f}",
        "90th percentile %": lambda r: f"{r['p90']:.1f}",
    }
    rows = sorted(rows_of(result, group=GROUP), key=lambda row: row["mean"])
    return f"{rows_table(rows, columns)}\n\n{source(result)}"


def kernels(path: Path) -> str:
    """Returns the table of errors on NeuSight's kernels of held-out GPUs, with and without rows of
    them."""
    result = read(path)
    few = next(row["split"] for row in result["rows"] if "," in row["split"])
    rows = {
        (row["group"], row["held_out"], row["method"], row["split"]): row for row in result["rows"]
    }
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    devices = list(dict.fromkeys(row["held_out"] for row in result["rows"]))
    lines = []
    for group, name in GROUP_TEXTS.items():
        for device in (d for d in devices if (group, d, "ours", few) in rows):
            unseen = {m: rows[group, device, m, "devices"] for m in methods}
            seen = {m: rows[group, device, m, few] for m in methods}
            cells = [f"{unseen[m]['mean']:.1f} / {seen[m]['mean']:.1f}" for m in methods]
            bands = (f"{100 * r['ours']['in_band']:.0f}" for r in (unseen, seen))
            where = "both" if device == EACH else device.removeprefix("NVIDIA ")
            lines.append(
                (
                    f"{name}, {where}",
                    f"{unseen['ours']['rows']:,}",
                    *cells,
                    " / ".join(bands),
                    NEUSIGHT[group] if device == EACH else "",
                )
            )
    heads = ("kernels", "rows", *methods, "% of times in our band", "NeuSight")
    text = (
        "Mean relative errors in %. Left of the slash the predictor has no row of the GPU, right "
        f"of it {result['shots']} rows of all its kernels. Mean over {result['rows'][0]['seeds']} "
        "seeds. NeuSight's errors, also without rows of the GPU, are means over an H100 too, whose "
        "rows we lack."
    )
    return "\n\n".join([markdown_table(heads, lines), text, source(result)])


def h200(path: Path) -> str:
    """Returns the table of errors on one H200, before and after its rows were learnt."""
    columns: Columns = {
        "what is predicted": "what",
        "rows": "rows",
        "mean error": lambda r: f"{100 * r['mean']:,.1f} %",
        "median error": lambda r: f"{100 * r['median']:,.1f} %",
        "times in the 90 % band": lambda r: (
            "" if r["coverage"] is None else f"{100 * r['coverage']:.0f} %"
        ),
    }
    return table(path, columns)


def _best(by_method: Mapping[str, Row], methods: Sequence[str]) -> list[str]:
    """Returns mean and median error of each method; the least mean is bold."""
    least = min(by_method[m]["mean"] for m in methods)
    cells = {m: f"{by_method[m]['mean']:.1f} / {by_method[m]['median']:.1f}" for m in methods}
    return [f"**{c}**" if by_method[m]["mean"] == least else c for m, c in cells.items()]
