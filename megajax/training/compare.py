"""Several runs side by side: what differs in their configurations, their figures, their curves.

Everything is read from the folders of runs (run_dir.py): config.json and metrics.jsonl, which may
be a stranger's and are bounded. No array is computed. `megajax compare` shows it.
"""

import dataclasses
import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.monitor.console import duration, quantity
from megajax.monitor.records import read_jsonl
from megajax.training.report import LAST
from megajax.training.run_dir import MAX_CONFIG, NOT_IN_NAME

MAX_METRICS = 2**30  # (chosen) bytes of a metrics.jsonl: a million steps of 1 kB
MAX_STEPS = 2_000_000  # (chosen)
MAX_RUNS = 64  # (chosen)
MAX_MEMBERS = 2000  # (chosen) of a configuration
WIDE = 60  # (chosen) characters of a value
POINTS = 2000  # (chosen) of a curve; of more steps, the mean of neighbours is drawn
SMOOTH = 0.02  # (chosen) share of the steps over which a drawn curve is a mean


@dataclasses.dataclass(frozen=True)
class History:
    """What a run's folder says.

    settings: {dotted name: value} of its configuration. losses, held_out: {step: loss}; a step
    whose loss was not finite has NaN. rates: per second, of each step. unit: what they count.
    """

    path: Path
    settings: Mapping[str, Any]
    losses: Mapping[int, float]
    held_out: Mapping[int, float]
    step_times_s: Sequence[float]
    rates: Sequence[float]
    unit: str

    @property
    def steps(self) -> int:
        """The last step."""
        return max(self.losses)

    def last_loss(self) -> float:
        """Returns the mean loss of the last steps."""
        finite = [self.losses[s] for s in sorted(self.losses)[-LAST:]]
        finite = [loss for loss in finite if math.isfinite(loss)]
        return statistics.fmean(finite) if finite else math.nan

    def figures(self) -> dict[str, Any]:
        """Returns the figures of a table's row."""
        known = [loss for loss in self.losses.values() if math.isfinite(loss)]
        planned = self.settings.get("train.steps")
        told = f" of {planned}" if isinstance(planned, int) and planned > self.steps else ""
        newest = self.held_out[max(self.held_out)] if self.held_out else None
        rate = statistics.median(self.rates) if self.rates else None
        unit = "tok" if self.unit == "tokens" else self.unit
        return {
            "last_loss": self.last_loss(),
            "best_loss": min(known, default=math.nan),
            "held_out": newest,
            "best_held_out": min(filter(math.isfinite, self.held_out.values()), default=None),
            "speed": None if rate is None else f"{quantity(rate)} {unit}/s",
            "steps": f"{self.steps}{told}",
            "time": duration(sum(self.step_times_s)),
        }


def read(folder: str) -> History:
    """Returns what the folder of a run says. Raises: UserError naming the folder."""
    path = expand(folder)
    if not path.is_dir():
        raise UserError(f"{folder} is no folder of a run: {_is_there(path)}")
    config, metrics = path / "config.json", path / "metrics.jsonl"
    for file in (config, metrics):
        if not file.exists():
            raise UserError(f"{folder} is no folder of a run: it has no {file.name}")
    settings = dict(_flat(files.read_object(config, MAX_CONFIG), "", str(config)))
    try:
        if metrics.stat().st_size > MAX_METRICS:
            raise UserError(f"{metrics} is larger than {MAX_METRICS:,} bytes")
        return _history(path, settings, metrics)
    except OSError as error:
        raise UserError(f"cannot read {metrics}: {error.strerror}") from None


def _is_there(path: Path) -> str:
    return "it is a file" if path.exists() else "it does not exist"


def _flat(node: Mapping[str, Any], prefix: str, file: str, depth: int = 0) -> Iterator[tuple]:
    """Yields (dotted name, value) of nested members. Raises: UserError for too many."""
    if depth > 4 or len(node) > MAX_MEMBERS:
        raise UserError(f"{file} is no configuration: it is nested too deep or too long")
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.", file, depth + 1)
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> float | None:
    """Returns a number as a float; None for anything else. JSON has null for NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _history(path: Path, settings: Mapping[str, Any], metrics: Path) -> History:
    losses: dict[int, float] = {}
    held_out: dict[int, float] = {}
    times: dict[int, float] = {}
    rates: dict[int, float] = {}
    unit = "tokens"
    for row in read_jsonl(metrics):
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
            continue
        if "loss" in row:
            number = _number(row["loss"])
            losses[step] = math.nan if number is None else number
            if (took := _number(row.get("step_time_s"))) is not None and took >= 0:
                times[step] = took
            for name in (n for n in row if n.endswith("_per_s")):
                if (rate := _number(row[name])) is not None:
                    rates[step], unit = rate, name.removesuffix("_per_s")[:WIDE]
                break
        elif "eval_loss" in row and (number := _number(row["eval_loss"])) is not None:
            held_out[step] = number
        if len(losses) > MAX_STEPS or len(held_out) > MAX_STEPS:
            raise UserError(f"{metrics} has over {MAX_STEPS:,} steps")
    if not losses:
        raise UserError(f"{path} has no step yet: its metrics.jsonl lacks losses")
    return History(path, settings, losses, held_out, [*times.values()], [*rates.values()], unit)


def differences(runs: Sequence[History]) -> dict[str, list[str]]:
    """Returns {dotted name: the value of each run, '-' where it has none} of members that differ.

    Where a run lies and who watches it is no difference, nor is a member that only some of the runs
    know: they are of different versions.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    shown = {}
    for name in names:
        if any(name == i or name.startswith(f"{i}.") for i in (*NOT_IN_NAME, "init_from")):
            continue
        values = [_spell(run.settings[name]) if name in run.settings else "-" for run in runs]
        if len({*values} - {"-"}) > 1:
            shown[name] = values
    return shown


def _spell(value: Any) -> str:
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= WIDE else f"{text[: WIDE - 3]}..."


def names(runs: Sequence[History]) -> list[str]:
    """Returns the shortest ends of the runs' paths that tell the runs apart."""
    parts = [run.path.absolute().parts for run in runs]
    for depth in range(1, max(map(len, parts))):
        ends = ["/".join(path[-depth:]) for path in parts]
        if len(set(ends)) == len(set(parts)):
            return [_spell(end) for end in ends]
    return [_spell(run.path) for run in runs]


COLUMNS = {
    "last loss": "last_loss",
    "best loss": "best_loss",
    "held out": "held_out",
    "best held out": "best_held_out",
    "speed": "speed",
    "steps": "steps",
    "time": "time",
}


def rows(runs: Sequence[History]) -> list[dict[str, Any]]:
    """Returns a row a run: its name, its figures, and the members that differ."""
    changed = differences(runs)
    return [
        {"run": name, **run.figures(), **{member: values[at] for member, values in changed.items()}}
        for at, (name, run) in enumerate(zip(names(runs), runs, strict=True))
    ]


def smooth(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Returns at most POINTS steps and the mean loss around each of them.

    The mean is over SMOOTH of the steps up to this one, so it shows nothing before it happened.
    """
    steps = [step for step in sorted(losses) if math.isfinite(losses[step])]
    window = max(round(SMOOTH * len(steps)), 1)
    stride = max(-(-len(steps) // POINTS), 1)
    total, sums = 0.0, [0.0]
    for step in steps:
        total += losses[step]
        sums.append(total)
    ends = list(range(stride, len(steps) + 1, stride)) or []
    if steps and (not ends or ends[-1] != len(steps)):
        ends.append(len(steps))
    starts = [max(end - window, 0) for end in ends]
    means = [(sums[end] - sums[at]) / (end - at) for at, end in zip(starts, ends, strict=True)]
    return [steps[end - 1] for end in ends], means


def draw(runs: Sequence[History], file: Path) -> list[Path]:
    """Draws the losses of runs over steps, as FILE.png and FILE.svg; held-out ones are dots.

    Returns: the files. Raises: OSError.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    best = min(runs, key=lambda run: (math.isnan(run.last_loss()), run.last_loss()))
    for at, (name, run) in enumerate(zip(names(runs), runs, strict=True)):
        colour = f"C{at % 10}"
        dashes = ("-", "--", ":", "-.")[at // 10 % 4]
        axes.plot(*smooth(run.losses), dashes, color=colour, lw=1.4, label=_plain(name))
        if run.held_out:
            held = sorted(run.held_out.items())
            axes.plot(*zip(*held, strict=True), "o", color=colour, ms=4, mec="white", mew=0.6)
    axes.set(xlabel="optimizer step", ylabel="loss (dots: held out)")
    at = runs.index(best)
    title = f"{names(runs)[at]} ends lowest: loss {best.last_loss():.3f} after {best.steps} steps"
    axes.set_title(_plain(title), fontsize=10, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    written = []
    with rc_context({"svg.hashsalt": file.name}):
        for suffix, about in ((".png", None), (".svg", {"Date": None})):
            picture = io.BytesIO()
            figure.savefig(picture, format=suffix[1:], metadata=about)
            files.write_whole(file.with_suffix(suffix), picture.getvalue())
            written.append(file.with_suffix(suffix))
    return written


def _plain(text: str) -> str:
    """Returns a text in which matplotlib reads no formula, and which a legend does not hide."""
    return text.replace("$", r"\$").lstrip("_") or "run"
