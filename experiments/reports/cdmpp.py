"""What experiments/cdmpp.py says: errors of a cost model in every split.

Errors are absolute errors relative to the measured time; a split also reports how many of its
measured times lie in the predicted 90 % band, and the noise floor of its labels where both halves
are known. Figures of several seeds are averaged.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments.reports.cdmpp_splits import Split
from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.cost.record import OpRecord
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.profile import NOISY

BAND = 1.645  # standard deviations of a 90 % band
PAPER = {"families": 14.03, "devices": 10.85}  # CDMPP abstract: cross-model, cross-device, percent
QUIET = "halves within 10 %"  # rows that the profile did not mark (NOISY)
FAMILY = "family "  # before the name of a family that is judged alone
EACH = "each in turn"  # all parts of a split together


class Model(Protocol):
    """What is judged."""

    def predict(  # noqa: D102
        self, records: Sequence[OpRecord], card: DeviceCard
    ) -> tuple[np.ndarray, np.ndarray]: ...


Fit = Callable[[Dataset], Any]
Row = dict[str, Any]


def repeats(dataset: Dataset) -> Row:
    """Returns by how much rows of one structure and device differ from their median, in percent.

    No predictor of single instructions can be better on one such row. Three rows or more count.
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
            found = [about | row for row in grouped(dataset, *part, halves, groups)]
            rows += found
            tell(text(found[0]))
            after(name, split, model)
        for split_name, pieces in parts.items():
            if len(pieces) > 1:
                judged, seconds, sigma = (
                    np.concatenate(column) for column in zip(*pieces, strict=True)
                )
                about = {"method": name, "split": split_name, "held_out": EACH}
                whole = grouped(dataset, judged, seconds, sigma, halves, groups)
                if families is not None and split_name == "families":
                    each = grouped(dataset, judged, seconds, sigma, halves, families)
                    whole += [
                        row | {"group": FAMILY + row["group"]}
                        for row in each
                        if row["group"] not in ("all", QUIET)
                    ]
                found = [about | row for row in whole]
                rows += found
                tell(text(found[0]))
    return rows


def judge(dataset: Dataset, split: Split, model: Model, halves: np.ndarray | None) -> list[Row]:
    """Returns the errors on all rows of a split, then those of each kind of record."""
    return grouped(dataset, split.judge, *predicted(dataset, split.judge, model), halves)


def predicted(dataset: Dataset, rows: np.ndarray, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Returns (seconds, sigma) of these rows."""
    devices = np.array([dataset.devices[i] for i in rows])
    seconds, sigma = np.zeros(len(rows)), np.zeros(len(rows))
    for device in sorted(set(devices.tolist())):
        here = devices == device
        records = [dataset.records[i] for i in rows[here]]
        seconds[here], sigma[here] = model.predict(records, dataset.cards[device])
    return seconds, sigma


def grouped(
    dataset: Dataset,
    rows: np.ndarray,
    found: np.ndarray,
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
    out = [{"group": "all", **errors(found, sigma, seconds, noise, everything)}]
    if noise is not None:
        is_quiet = np.ptp(noise, 1) <= NOISY * noise.min(1)
        if is_quiet.any():
            out.append({"group": QUIET, **errors(found, sigma, seconds, noise, is_quiet)})
    for name in sorted(set(names.tolist())):
        out.append({"group": name, **errors(found, sigma, seconds, noise, names == name)})
    return out


def errors(
    predicted: np.ndarray,
    sigma: np.ndarray,
    seconds: np.ndarray,
    halves: np.ndarray | None,
    here: np.ndarray,
) -> Row:
    """Returns percent errors of some rows: mean, median, 90th percentile, of the sum of seconds;
    the share in the 90 % band where there is one, and the labels' own disagreement."""
    apart = np.abs(predicted - seconds)[here]
    relative = 100 * apart / seconds[here]
    found = {
        "rows": int(here.sum()),
        "mean": float(relative.mean()),
        "median": float(np.median(relative)),
        "p90": float(np.percentile(relative, 90)),
        "weighted": float(100 * apart.sum() / seconds[here].sum()),
    }
    if not np.isnan(sigma[here]).any():
        found["in_band"] = float((apart <= BAND * sigma[here]).mean())
    if halves is not None:
        noise = 100 * np.ptp(halves[here], 1) / halves[here].min(1)
        found |= {"noise_mean": float(noise.mean()), "noise_median": float(np.median(noise))}
    return found


def averaged(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns the rows of several seeds as one: means, and the least and largest mean error."""
    found: dict[tuple, list[Row]] = {}
    for row in itertools.chain(*runs):
        key = tuple(row[name] for name in ("method", "split", "held_out", "group"))
        found.setdefault(key, []).append(row)
    out = []
    for rows in found.values():
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


def markdown(rows: Sequence[Row]) -> str:
    """Returns a table of all splits and methods, all groups together."""
    lines = [
        "| split | held out | method | rows | mean % | median % | p90 % | of the sum % | in band % "
        "| noise % | paper % |",
        "|" + "---|" * 11,
    ]
    for row in rows:
        if row["group"] != "all":
            continue
        noise = f"{row['noise_mean']:.1f}" if "noise_mean" in row else "-"
        band = f"{100 * row['in_band']:.0f}" if "in_band" in row else "-"
        paper = PAPER.get(row["split"].split(",")[0], "-")
        lines.append(
            f"| {row['split']} | {row['held_out']} | {row['method']} | {row['rows']} | "
            f"{row['mean']:.1f} | {row['median']:.1f} | {row['p90']:.1f} | {row['weighted']:.1f} | "
            f"{band} | {noise} | {paper} |"
        )
    return "\n".join(lines)


def rows_before(path: Path) -> dict[str, Any]:
    """Returns what a file of an earlier evaluation holds; {} if there is none.

    Raises: UserError if it holds something else, which this evaluation would overwrite.
    """
    if not path.exists():
        return {}
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise UserError(f"{path} is no evaluation; remove it or name another file (--json)")
    return found


def kept(before: Mapping[str, Any], about: Mapping[str, Any], found: list[Any]) -> list[Any]:
    """Returns the rows of the same data by methods or in splits that were not run now."""
    same = all(before.get(name) == about[name] for name in ("data", "rows_unique", "shots"))
    new = {(row["method"], row["split"]) for row in found}
    rows = before.get("rows", ()) if same else ()
    return [row for row in rows if (row["method"], row["split"]) not in new]
