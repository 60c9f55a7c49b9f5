"""Where records go: metrics.jsonl (the truth), TensorBoard, Weights & Biases, Prometheus."""

import errno
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core import files
from megajax.core.errors import UserError
from megajax.monitor.lines import Lines
from megajax.monitor.records import Record, Value

MAX_ROW = 2**24  # (chosen) bytes of a line; what is longer is no row
_WORD = re.compile(r"[^a-zA-Z0-9_]")  # what the name of a metric may not have
FLUSH_S = 10.0  # (chosen) seconds between writes of TensorBoard's events


def _finite(value: Value) -> Value:
    """Returns None for what JSON cannot say."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Jsonl:
    """One line for each moment: {"step", "time", name: value...}, flushed at once.

    A row that the disk does not take is lost; the next one that it takes says how many were, as
    "rows_lost".
    """

    def __init__(self, path: Path):
        """Appends; half a line that a killed run left at the end is dropped."""
        self._lines = Lines(path)

    def write(self, records: Sequence[Record]) -> None:
        """Writes one line. Raises: OSError when the disk does not take it."""
        row = {"step": records[0].step, "time": round(records[0].time, 3)}
        row |= {r.name: _finite(r.value) for r in records}
        if self._lines.lost:
            row["rows_lost"] = self._lines.lost
        if not self._lines.write(json.dumps(row)):
            raise OSError(errno.EIO, self._lines.why)
        self._lines.lost = 0

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics file; half a line at the end is left out, and what is no row."""
    if not path.exists():
        return
    with files.open_regular(path) as file:
        while line := file.readline(MAX_ROW):
            try:
                row = files.parse_json(line.decode("utf-8", errors="replace"))
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def rows_by_step(path: Path, key: str) -> dict[int, dict[str, Any]]:
    """Returns {step: row} of the rows that have `key`; the last row of a step wins."""
    rows = (row for row in read_jsonl(path) if key in row)
    return {row["step"]: row for row in rows if isinstance(row.get("step"), int)}


TRAINING = ("loss", "loss_smooth", "grad_norm", "lr", "z_squared", "tokens", "targets")
SPEED = ("tokens_per_s", "mfu", "mfu_causal", "data_wait")
GROUPS = (
    ("eval_", "eval"), ("moe_", "moe"), ("wire_", "wire"), ("start_", "start"),
    ("time_", "time"), ("memory_", "memory"), ("kept.", "pruning"),
)  # fmt: skip
METRICS = ("train/loss", "eval/loss", "speed/tokens_per_s")  # beside the hyperparameters


def tag(name: str) -> str:
    """Returns what a value is called in TensorBoard: 'train/loss', 'eval/loss', 'speed/mfu'."""
    if name in TRAINING or name.startswith("accuracy"):
        return f"train/{name}"
    for prefix, group in GROUPS:
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}"
    if name == "sparsity":
        return f"pruning/{name}"
    return f"speed/{name}" if name in SPEED or name.endswith("_s") else f"other/{name}"


class TensorBoard:
    """Event files, readable by `tensorboard --logdir`. Tags are in groups (`tag`).

    tensorboardX's SummaryWriter hands events to a thread, which a full disk ends; its queue then
    fills and blocks the training loop for ever. Events are therefore written here, in the caller.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None):
        """Loads tensorboardX only now. settings: of the run, for the page of hyperparameters."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[missing-module-attribute]
        from tensorboardX.summary import hparams

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        self._flushed = 0.0
        if settings:
            known = (bool, int, float, str)
            plain = {n: v if isinstance(v, known) else str(v) for n, v in settings.items()}
            for summary in hparams(plain, dict.fromkeys(METRICS, 0.0)):
                self._writer.write_event(Event(wall_time=time.time(), summary=summary))

    def write(self, records: Sequence[Record]) -> None:
        """Writes every number as a scalar. Raises: OSError when the disk does not take it."""
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[missing-module-attribute]
        from tensorboardX.summary import scalar

        for r in records:
            if isinstance(r.value, (int, float)) and math.isfinite(r.value):
                summary = scalar(tag(r.name), r.value)
                self._writer.write_event(Event(wall_time=r.time, step=r.step, summary=summary))
        if time.monotonic() > self._flushed + FLUSH_S:
            self._flushed = time.monotonic()
            self._writer.flush()

    def close(self) -> None:
        """Flushes the events."""
        self._writer.close()


class Prometheus:
    """The newest numbers of all hosts, ranks and devices, in Prometheus' text format.

    A record `loss` becomes `megajax_rank_loss{host="a",rank="0"}`; of a whole host
    `megajax_host_...{host="a"}`, of a device `megajax_device_...{host="a",device="0"}`.
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._values: dict[str, dict[str, float]] = {}  # metric -> labels -> value

    def write(self, records: Sequence[Record]) -> None:
        """Takes numbers; texts are left out."""
        for r in records:
            if isinstance(r.value, int | float):
                kind = "host" if r.rank is None else "rank"
                kind = kind if r.device is None else "device"
                known = self._values.setdefault(f"megajax_{kind}_{_WORD.sub('_', r.name)}", {})
                known[_labels(r)] = r.value

    def lines(self) -> list[str]:
        """Returns the lines of the file."""
        found = []
        for metric, values in self._values.items():
            found.append(f"# TYPE {metric} gauge")
            found += [f"{metric}{labels} {value:.10g}" for labels, value in values.items()]
        return found

    def close(self) -> None:
        """Holds no file."""


def _labels(record: Record) -> str:
    host = record.host.replace("\\", r"\\").replace('"', r"\"")
    named = {"host": host, "rank": record.rank, "device": record.device}
    return "{" + ",".join(f'{n}="{v}"' for n, v in named.items() if v is not None) + "}"


class Wandb:
    """A Weights & Biases run; the extra `wandb` must be installed."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]):
        """Resumes the run of the same name. Raises: UserError without the package."""
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise UserError("--log.wandb needs the package: uv sync --extra wandb") from None
        run_id = "".join(c if c.isalnum() else "-" for c in name)
        self._run = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=folder, config=dict(config)
        )

    def write(self, records: Sequence[Record]) -> None:
        """Logs all values of the moment."""
        values = {r.name: r.value for r in records if r.value is not None}
        self._attempt(lambda: self._run.log(values, step=records[0].step))

    def close(self) -> None:
        """Ends the run."""
        self._attempt(self._run.finish)

    def _attempt(self, work: Callable[[], Any]) -> None:
        """Raises: OSError for any error of the package: no run ends because of it."""
        try:
            work()
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from None
