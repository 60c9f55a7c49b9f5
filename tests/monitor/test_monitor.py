import io
import json
import math
import os
import shutil
import struct

import pytest
from rich.console import Console as RichConsole
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from megajax.core.errors import UserError
from megajax.monitor import records
from megajax.monitor.console import (
    Console,
    Phases,
    duration,
    kept_line,
    quantity,
    training_line,
)
from megajax.monitor.meter import Meter, Work
from megajax.monitor.records import Jsonl, Recorder, TensorBoard, Wandb, read_jsonl, rows_by_step

ROW = {
    "loss": 2.5,
    "loss_smooth": 2.6,
    "grad_norm": 0.5,
    "tokens_per_s": 9830.0,
    "mfu": None,
    "memory_gib": 1.5,
    "data_wait": 0.01,
    "eta_s": 61.0,
}


def test_rows_are_flushed_at_once_and_the_last_of_a_step_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder([Jsonl(path)])
    recorder.emit(1, {"loss": 3.0})
    recorder.emit(2, {"loss": 2.0, "lr": 0.1})
    recorder.emit(2, {"eval_loss": 1.5})
    recorder.emit(2, {"loss": 1.0})  # a resumed run repeats step 2
    rows = list(read_jsonl(path))  # before close
    assert [r["step"] for r in rows] == [1, 2, 2, 2]
    assert {s: r["loss"] for s, r in rows_by_step(path, "loss").items()} == {1: 3.0, 2: 1.0}
    assert rows_by_step(path, "eval_loss")[2]["eval_loss"] == 1.5
    recorder.close()


def test_numbers_that_json_lacks_are_null(tmp_path):
    recorder = Recorder([Jsonl(tmp_path / "m.jsonl")])
    recorder.emit(1, {"loss": math.nan, "eta_s": math.inf})
    row = json.loads((tmp_path / "m.jsonl").read_text())
    assert row["loss"] is None and row["eta_s"] is None
    recorder.close()


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    recorder = Recorder([Jsonl(path)])
    recorder.emit(2, {"loss": 2.0})
    recorder.close()
    assert [r["step"] for r in read_jsonl(path)] == [1, 2]


def test_a_long_tail_without_a_line_is_dropped_piece_by_piece(tmp_path, monkeypatch):
    """As zeros are that a machine without power leaves."""
    path, read, most = tmp_path / "m.jsonl", os.pread, []
    monkeypatch.setattr(records, "CHUNK", 8)
    monkeypatch.setattr(os, "pread", lambda f, n, at: most.append(n) or read(f, n, at))
    for good in ("", '{"step": 1}\n', '{"step": 1}\n{"step": 2}\n'):
        for tail in ("", "x", "\0" * 7, "\0" * 8, "\0" * 99):
            path.write_text(good + tail)
            records.Lines(path).close()
            assert path.read_text() == good
    assert max(most) == 8


def test_rows_without_a_step_are_no_rows_of_a_step(tmp_path):
    rows = [{"step": 1, "loss": 2.0}, {"loss": 1.0}, {"step": "x", "loss": 1.0}, [], {"step": 1}]
    (tmp_path / "m").write_text("\n".join(map(json.dumps, rows)) + "\n" + "[" * 50_000)
    assert rows_by_step(tmp_path / "m", "loss") == {1: rows[0]}


def test_rows_that_the_disk_does_not_take_are_counted_and_no_run_ends(tmp_path, monkeypatch):
    """A full disk takes the half of a line; later there is room again."""
    path, said = tmp_path / "m.jsonl", []
    recorder = Recorder([Jsonl(path), board := TensorBoard(tmp_path / "tb")], tell=said.append)
    recorder.emit(1, {"loss": 3.0})
    write = os.write
    with monkeypatch.context() as m:
        m.setattr(os, "write", lambda file, data: write(file, data[:5]))
        m.setattr(board._writer, "flush", lambda: (_ for _ in ()).throw(OSError(28, "full")))
        m.setattr(records, "FLUSH_S", 0.0)
        for step in range(2, 40):
            recorder.emit(step, {"loss": 2.0})
    recorder.emit(40, {"loss": 1.0})
    recorder.close()
    rows = list(read_jsonl(path))
    assert [(r["step"], r.get("rows_lost")) for r in rows] == [(1, None), (40, 38)]
    assert path.read_text().count("\n") == 2
    assert [("cannot write" in s, "38 rows were lost" in s) for s in said] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]


def test_a_metrics_file_that_is_removed_is_made_again(tmp_path):
    recorder = Recorder([Jsonl(tmp_path / "run" / "m.jsonl")])
    recorder.emit(1, {"loss": 3.0})
    shutil.rmtree(tmp_path / "run")
    recorder.emit(2, {"loss": 2.0})
    recorder.close()
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "m.jsonl")] == [2]


def events(folder):
    """Returns the events of a TensorBoard file: records of a length, a sum, the bytes, a sum."""
    raw, parsed = next(folder.glob("events*")).read_bytes(), []
    while raw:
        (size,) = struct.unpack("<Q", raw[:8])
        parsed.append(Event.FromString(raw[12 : 12 + size]))
        raw = raw[16 + size :]
    return parsed


def test_tensorboard_events_are_read_back(tmp_path):
    settings = {"optim.lr": 0.5, "data.source": "docs", "zero": True, "layers": 2, "none": None}
    recorder = Recorder([TensorBoard(tmp_path, settings)])
    values = dict.fromkeys(TAGS, 2.0)
    recorder.emit(7, values | {"bad": math.nan, "none": None, "text": "x"})
    recorder.close()
    written = events(tmp_path)
    scalars = [(v.tag, v.simple_value) for e in written if e.step == 7 for v in e.summary.value]
    assert scalars == [(tag, 2.0) for tag in TAGS.values()]
    (start,) = [
        v.metadata.plugin_data
        for e in written
        for v in e.summary.value
        if v.tag == "_hparams_/session_start_info"
    ]
    assert start.plugin_name == "hparams"
    said = HParamsPluginData.FromString(start.content).session_start_info.hparams
    assert said["optim.lr"].number_value == 0.5 and said["data.source"].string_value == "docs"
    assert said["zero"].bool_value and said["layers"].number_value == 2


TAGS = {
    "loss": "train/loss", "loss_smooth": "train/loss_smooth", "grad_norm": "train/grad_norm",
    "lr": "train/lr", "accuracy": "train/accuracy", "eval_loss": "eval/loss",
    "eval_bits_per_byte": "eval/bits_per_byte", "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu", "step_time_s": "speed/step_time_s", "eta_s": "speed/eta_s",
    "memory_gib": "memory/gib", "moe_drop": "moe/drop", "wire_between_bytes": "wire/between_bytes",
    "start_data_s": "start/data_s", "time_launch_s": "time/launch_s",
    "sparsity": "pruning/sparsity",
    "kept.mlp.up": "pruning/mlp.up", "checkpoint_refuted": "other/checkpoint_refuted",
}  # fmt: skip


def test_wandb_without_the_package_says_how_to_get_it(tmp_path):
    with pytest.raises(UserError, match="uv sync --extra wandb"):
        Wandb("project", "name", tmp_path, {})


def capture(terminal):
    out = io.StringIO()
    return out, RichConsole(file=out, force_terminal=terminal, width=160, highlight=False)


def test_plain_lines_when_not_a_terminal():
    out, rich = capture(terminal=False)
    recorder = Recorder([console := Console(100, 10, rich)])
    for step in range(1, 21):
        recorder.emit(step, ROW)
    recorder.emit(20, {"eval_loss": 2.0, "eval_bits_per_byte": 2.9, "eval_tokens": 64.0})
    console.close()
    records = out.getvalue().splitlines()
    assert records == [
        f"step {s}/100 | loss 2.5000 (mean 2.6000) | grad 0.5 | 9.83k tok/s | MFU N/A | 1.50 GiB"
        " | wait 1.0 % | ETA 1:01"
        for s in (1, 10, 20)
    ] + ["step 20: held-out loss 2.0000 nats, 2.900 bits per byte"]


def test_a_live_line_in_a_terminal():
    out, rich = capture(terminal=True)
    recorder = Recorder([console := Console(100, 10, rich)])
    for step in range(1, 4):
        recorder.emit(step, ROW | {"mfu": 0.512})
    console.say("a message above")
    recorder.close()
    assert "step 3/100" in out.getvalue() and "MFU 51.2 %" in out.getvalue()
    assert "a message above" in out.getvalue() and "\x1b[" in out.getvalue()


PARTS = ("step", "loss", "mean", "grad", "tok/s", "MFU", "GiB", "wait", "ETA")


@pytest.mark.parametrize(
    ("width", "gone"),
    [
        (200, ""), (109, ""), (108, "wait"), (96, "wait"), (95, "wait GiB"), (85, "wait GiB"),
        (84, "wait GiB MFU"), (80, "wait GiB MFU"), (75, "wait GiB MFU"),
        (74, "wait GiB MFU grad"), (64, "wait GiB MFU grad"), (63, "wait GiB MFU grad mean"),
        (50, "wait GiB MFU grad mean"), (49, "wait GiB MFU grad mean tok/s"),
        (40, "wait GiB MFU grad mean tok/s"),
    ],
)  # fmt: skip
def test_what_a_narrow_terminal_does_without(width, gone):
    """Counted by hand from the whole line, which has 109 characters."""
    line = training_line(12, 100, ROW, width)
    assert len(line) <= width
    assert [part for part in PARTS if part not in line] == sorted(gone.split(), key=PARTS.index)
    assert line.startswith("step 12/100 | loss 2.5000") and line.endswith("| ETA 1:01")


@pytest.mark.parametrize("width", range(40, 201))
def test_step_loss_and_time_stay_at_every_width(width):
    row = ROW | {"loss": 11.12345, "eta_s": 359_999, "mfu": 0.5, "tokens_per_s": 1.5e6}
    for step, steps in ((1, 100), (123_456, 1_000_000)):
        line = training_line(step, steps, row, width)
        assert len(line) <= width and str(step) in line
        assert "11.1" in line and "ETA 99:59:59" in line


def test_a_line_stays_in_a_terminal_every_few_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("megajax.monitor.console.time.perf_counter", lambda: now[0])
    out = io.StringIO()
    rich = RichConsole(file=out, force_terminal=True, width=80, highlight=False)
    said = []
    console = Console(100, 10, rich)
    monkeypatch.setattr(console, "say", said.append)
    recorder = Recorder([console])
    for step in range(1, 31):  # a step a second
        recorder.emit(step, ROW)
        now[0] += 1.0
    recorder.close()
    assert [line.split()[1] for line in said] == [f"{s}/100" for s in (1, 6, 11, 16, 21, 26, 30)]
    assert all(len(line) < 80 and line.endswith("ETA 1:01") for line in said)
    live = [line for line in out.getvalue().split("\r") if "step 30/100" in line]
    assert live and "loss 2.5000" in live[-1] and "ETA 1:01" in live[-1]


def test_a_quiet_process_says_nothing(capsys):
    console = Console(10, 1, quiet=True)
    console.say("hello")
    assert capsys.readouterr().out == ""


def test_meter_counts_from_the_second_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    meter = Meter(Work(1000, 6e9, 5e9, 1e15), steps=10)
    now[0] += 30.0  # the first step compiles
    first = meter.finish(1, 4.0)
    assert first["step_time_s"] == 30.0 and math.isinf(first["eta_s"])
    now[0] += 0.5
    meter.waited(0.1)
    second = meter.finish(2, 2.0)
    assert second["tokens_per_s"] == 2000 and second["eta_s"] == 4.0
    assert second["mfu"] == pytest.approx(2000 * 6e9 / 1e15)
    assert second["mfu_causal"] == pytest.approx(2000 * 5e9 / 1e15)
    assert second["data_wait"] == pytest.approx(0.2)
    assert second["loss_smooth"] == pytest.approx(0.9 * 4.0 + 0.1 * 2.0)
    now[0] += 100.0  # an evaluation
    meter.restart()
    now[0] += 0.5
    assert meter.finish(3, 2.0)["step_time_s"] == 0.5


def test_no_peak_no_mfu():
    assert Meter(Work(1000, 6e9, 5e9, None), 10).finish(1, 1.0)["mfu"] is None


def test_words_for_numbers():
    assert [duration(s) for s in (5, 61, 3723)] == ["0:05", "1:01", "1:02:03"]
    assert [quantity(x) for x in (5, 9830, 1.24e9, 7e12)] == ["5", "9.83k", "1.24G", "7T"]


def test_phases_follow_one_another_from_the_given_moment(monkeypatch):
    moments = iter([3.5, 10.0])
    monkeypatch.setattr("megajax.monitor.console.time.perf_counter", lambda: next(moments))
    text = io.StringIO()
    console = Console(10, 5, RichConsole(file=text))
    phases = Phases(begin=1.0)
    phases.done("devices", console, "joined")
    phases.done("data", console, "data ready")
    assert phases.seconds == {"start_devices_s": 2.5, "start_data_s": 6.5}
    assert text.getvalue() == "joined [2.5 s]\ndata ready [6.5 s]\n"


def test_a_pruning_says_what_each_matrix_keeps():
    rich = RichConsole(file=io.StringIO(), width=160, highlight=False)
    shares = {"mlp.up.0": 0.231, "mlp.up.1": 0.27, "attention.out.0": 0.25, "mlp.down": 0.0}
    row = {"sparsity": 0.75} | {f"kept.blocks.{n}": x for n, x in shares.items()}
    Recorder([Console(100, 10, rich)]).emit(3, row)
    assert rich.file.getvalue().splitlines() == [
        "after step 3: 75.00% of the chosen weights pruned",
        "kept of each matrix: mlp.up 23.1 to 27 %, attention.out 25 %, mlp.down 0 %",
    ]
    assert kept_line({"sparsity": 0.5}) == ""
