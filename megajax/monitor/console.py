"""The progress line: live in a terminal, plain lines elsewhere.

In a terminal a line also stays in the scrollback every few seconds. Both fit the terminal's width:
step, loss and time to the end are always there, and the other parts go in a fixed order.
"""

import math
import time
from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from megajax.monitor.records import SCORE, Record

STAYS_S = 5.0  # (chosen) seconds between lines that stay in a terminal
BAR = 20  # characters of the bar
BAR_FROM = 120  # (chosen) columns of a terminal from which on there is a bar beside the line
# The parts of a line that a narrow terminal does without, in this order.
GO_FIRST = ("wait", "memory", "mfu", "gradient", "mean", "speed")


def duration(seconds: float) -> str:
    """Returns 1:02:03 or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def quantity(x: float) -> str:
    """Returns 9.83k, 1.2M and the like."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= limit:
            return f"{x / limit:.3g}{unit}"
    return f"{x:.3g}"


class Console:
    """A sink for training rows and evaluations, and the place for messages between them."""

    def __init__(self, steps: int, every: int, out: RichConsole | None = None, quiet: bool = False):
        """steps: steps of the run. every: steps between plain lines. quiet: print nothing."""
        self.out = out or RichConsole(highlight=False, soft_wrap=True, quiet=quiet)
        self._steps, self._every = steps, max(every, 1)
        self._progress: Progress | None = None
        self._last_line, self._unsaid = -math.inf, ""  # what only the live line shows
        if self.out.is_terminal:
            self._has_bar = self.out.width >= BAR_FROM
            columns = [BarColumn(bar_width=BAR)] if self._has_bar else []
            text = TextColumn("{task.description}", table_column=Column(no_wrap=True))
            self._progress = Progress(*columns, text, console=self.out, transient=True)
            self._task = self._progress.add_task("compiling", total=steps)
            self._progress.start()

    def write(self, records: Sequence[Record]) -> None:
        """Shows a training row, or an evaluation's."""
        values = {r.name: r.value for r in records}
        step = records[0].step or 0
        if "loss" in values:
            self._show(step, values)
        elif "eval_loss" in values:
            bits = values.get("eval_bits_per_byte")
            tail = f", {bits:.3f} bits per byte" if isinstance(bits, float) else ""
            if "eval_accuracy" in values:
                tail = f", accuracy {values['eval_accuracy']:.1%}"
            if "eval_majority" in values:
                tail += f" (one answer for all: {values['eval_majority']:.1%})"
            unit = " nats" if "eval_tokens" in values else ""
            self.say(f"step {step}: held-out loss {values['eval_loss']:.4f}{unit}{tail}")
        elif "sparsity" in values:
            self.say(f"after step {step}: {values['sparsity']:.2%} of the chosen weights pruned")
            if line := kept_line(values):
                self.say(line)

    def _show(self, step: int, values: dict) -> None:
        if self._progress is not None:
            room = self.out.width - 1  # a full line may wrap
            now, self._unsaid = time.perf_counter(), training_line(step, self._steps, values, room)
            if now >= self._last_line + STAYS_S or step == self._steps:
                self._last_line = now
                self.say(self._unsaid)
                self._unsaid = ""
            line = training_line(step, self._steps, values, room - (BAR + 1) * self._has_bar)
            self._progress.update(self._task, completed=step, description=escape(line))
        elif step % self._every == 0 or step in (1, self._steps):
            self.say(training_line(step, self._steps, values))

    def say(self, message: str) -> None:
        """Prints a message above the live line."""
        self.out.print(message, markup=False)

    def close(self) -> None:
        """Removes the live line; what it showed last stays as a line."""
        if self._progress is not None:
            self._progress.stop()
            if self._unsaid:
                self.say(self._unsaid)
                self._unsaid = ""


def training_line(step: int, steps: int, values: dict, width: int | None = None) -> str:
    """Returns 'step 3/100 | loss 2.31 (mean 2.40) | grad 0.8 | 9.8k tok/s | ... | ETA 1:01'.

    width: columns that it may take; None: any. What does not fit goes in the order of GO_FIRST,
    then words and digits do; step, loss and ETA stay.
    """
    columns = math.inf if width is None else width
    used, loss = values.get("mfu"), values["loss"]
    eta = duration(values["eta_s"]) if math.isfinite(values["eta_s"]) else "-"
    score = values.get(SCORE)
    parts = {
        **({} if score is None else {"score": f"score {score:.3f}"}),
        "gradient": f"grad {values['grad_norm']:.3g}",
        "speed": speed(values),
        "mfu": f"MFU {100 * used:.1f} %" if used is not None else "MFU N/A",
        "memory": f"{values['memory_gib']:.2f} GiB",
        "wait": f"wait {100 * values['data_wait']:.1f} %",
    }
    for gone in range(len(GO_FIRST) + 1):
        left = [text for name, text in parts.items() if name not in GO_FIRST[:gone]]
        mean = "" if "mean" in GO_FIRST[:gone] else f" (mean {values['loss_smooth']:.4f})"
        line = " | ".join([f"step {step}/{steps}", f"loss {loss:.4f}{mean}", *left, f"ETA {eta}"])
        if len(line) <= columns:
            return line
    shorter = (
        f"step {step} | loss {loss:.4f} | ETA {eta}",
        f"step {step} loss {loss:.3g} ETA {eta}",
    )
    return next((line for line in shorter if len(line) <= columns), f"{step} {loss:.3g} {eta}")


def speed(values: dict) -> str:
    """Returns the speed, such as '9.8k tok/s', in the unit that the run counts ('images_per_s')."""
    name = next(n for n in values if n.endswith("_per_s"))
    unit = name.removesuffix("_per_s")
    return f"{quantity(values[name])} {'tok' if unit == 'tokens' else unit}/s"


def kept_line(values: dict) -> str:
    """Returns 'kept of each matrix: attention.query 23 to 27 %, ...', a range over the layers.

    From the members 'kept.<matrix>' and 'kept.<matrix>.<layer>' of a pruning's row; '' without.
    """
    by_leaf: dict[str, list[float]] = {}
    for name, value in values.items():
        if name.startswith("kept."):
            parts = name.removeprefix("kept.").split(".")
            leaf = ".".join(parts[:-1] if parts[-1].isdigit() else parts)
            by_leaf.setdefault(leaf, []).append(100 * value)
    stacks = {leaf.partition(".")[0] for leaf in by_leaf}  # one goes without saying
    shown = []
    for leaf, shares in by_leaf.items():
        leaf = leaf.partition(".")[2] if len(stacks) == 1 else leaf
        low, high = f"{min(shares):.3g}", f"{max(shares):.3g}"
        shown.append(f"{leaf} {low} %" if low == high else f"{leaf} {low} to {high} %")
    return f"kept of each matrix: {', '.join(shown)}" if shown else ""


class Phases:
    """Announces the phases of a start with their time, so that a slow start can be tuned.

    seconds: time of each finished phase, by its name in metrics.jsonl: 'start_<name>_s'.
    """

    def __init__(self, begin: float):
        """begin: when the first phase began, by time.perf_counter."""
        self._begin = begin
        self.seconds: dict[str, float] = {}

    def done(self, name: str, out: Console, what: str) -> None:
        """Ends a phase and prints its time. what: what was done in it."""
        now = time.perf_counter()
        self.seconds[f"start_{name}_s"] = now - self._begin
        out.say(f"{what} [{now - self._begin:.1f} s]")
        self._begin = now
