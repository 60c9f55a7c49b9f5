"""What a finished run says of itself."""

import errno
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.data.tokenizer import ByteTokenizer
from megajax.monitor.records import Lossy
from megajax.training import report
from megajax.training.config import Config
from megajax.training.evaluate import by_label
from megajax.training.presets import PRESETS
from megajax.training.report import show_end, write_report
from megajax.training.run_dir import RunDir, open_run, run_path
from megajax.training.run_lock import RunLock


def test_the_summary_the_title_and_the_table_agree(tmp_path):
    """24 steps, the last held-out loss at step 20: each figure with the steps that it is of."""
    rows = [
        {"step": s, "loss": 5 - 0.1 * s, "step_time_s": 0.5, "tokens": 64} for s in range(1, 25)
    ]
    rows[22]["loss"] = None  # was not finite
    rows += [{"step": s, "eval_loss": 3.5, "eval_bits_per_byte": 5.05} for s in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    facts = {
        "preset": "nano",
        "seed": 3,
        "overrides": "--optim.lr=0.01 --eval.prompt='a|b\n$\\c{$\udce9'",
        "command": "uv run experiments/pretrain.py --optim.lr=0.01",
    }
    figures = report.write_report(tmp_path, facts, None)
    mean = sum(5 - 0.1 * s for s in (15, 16, 17, 18, 19, 20, 21, 22, 24)) / 9
    assert abs(figures["last_10_loss"] - mean) < 1e-12 and figures["eval_step"] == 20
    text = (tmp_path / "summary.md").read_text()
    for line in (
        "| preset | nano |",
        "| overrides | --optim.lr=0.01 --eval.prompt='a\\|b $\\c{$\\udce9' |",
        "| seed | 3 |",
        "| command | uv run experiments/pretrain.py --optim.lr=0.01 |",
        "| eval_step | 20 |",
        f"| last_10_loss | {mean:.4g} |",
    ):
        assert line in text, text
    train = report.rows_by_step(tmp_path / "metrics.jsonl", "loss")
    held_out = report.rows_by_step(tmp_path / "metrics.jsonl", "eval_loss")
    assert report.title(train, held_out) == (
        f"training loss {mean:.2f} nats (mean of steps 15 to 24),\n"
        "held out 5.05 bits per byte (step 20)"
    )
    assert (tmp_path / "curve.png").stat().st_size > 0
    assert report.title({1: {"loss": None}}, {}) == "loss not finite"


def some_rows(folder):
    row = {"step": 1, "loss": 2.5, "step_time_s": 0.5, "tokens": 64}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture
def full(monkeypatch):
    """A disk that takes no more bytes, though small files can be opened on it."""

    def write(path, data, *args, **kwargs):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def sync(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill():
        monkeypatch.setattr(os, "fsync", sync)
        for name in ("write_bytes", "write_text"):
            monkeypatch.setattr(Path, name, write)

    return fill


def test_a_report_that_cannot_be_written_is_told_and_the_figures_are_there(tmp_path, full):
    some_rows(tmp_path)
    full()
    heard = []
    figures = report.write_report(tmp_path, {"preset": "nano"}, None, heard.append)
    assert figures["last_10_loss"] == 2.5 and figures["steps"] == 1
    assert heard == [
        f"cannot write {tmp_path}/curve.png: No space left on device",
        f"cannot write {tmp_path}/summary.md: No space left on device",
        f"cannot write {tmp_path}/summary.json: No space left on device",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]  # nothing half-written


def test_a_picture_that_cannot_be_drawn_takes_nothing_else_with_it(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no font")

    some_rows(tmp_path)
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
    heard = []
    assert report.write_report(tmp_path, {}, None, heard.append)["steps"] == 1
    assert heard == [f"cannot write {tmp_path}/curve.png: RuntimeError: no font"]
    assert (tmp_path / "summary.md").exists() and (tmp_path / "summary.json").exists()


def test_metrics_that_cannot_be_read_are_told(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    heard = []
    assert report.write_report(tmp_path, {}, None, heard.append) == {}
    assert len(heard) == 1 and "named pipe" in heard[0]


def test_a_full_disk_at_the_start(tmp_path, full, monkeypatch):
    """A new run is refused in a sentence; a run that continues keeps its former configuration."""
    cfg = Config()
    RunDir(tmp_path / "old").begin(cfg, ByteTokenizer())
    saved = (tmp_path / "old" / "config.json").read_text()
    full()
    with pytest.raises(UserError, match=r"cannot write to .*new: No space left .*--run_dir"):
        RunDir(tmp_path / "new").begin(cfg, ByteTokenizer())
    assert not (tmp_path / "new" / "config.json").exists()
    other = Config(log=type(cfg.log)(every=3))
    RunDir(tmp_path / "old").begin(other, ByteTokenizer())
    assert (tmp_path / "old" / "config.json").read_text() == saved
    open_run(Config(run_dir=str(tmp_path / "old")), "pretrain", "nano")

    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    lock = RunLock(tmp_path / "old")  # holds, though it cannot name its holder
    with pytest.raises(UserError, match="in use by another process"):
        RunLock(tmp_path / "old", patience_s=0)
    lock.release()


FULL_OUTPUT = """
import sys
from megajax.core import script
from megajax.monitor.records import keep_standard_streams
if sys.argv[1] == "run":
    keep_standard_streams(pipes=False)
with script.output_may_close():
    print("x" * 100, flush=sys.argv[1] == "now")
    sys.exit(3 if sys.argv[1] == "run" else 0)
"""


@pytest.mark.parametrize(("kind", "code"), [("run", 3), ("end", 1), ("now", 1)])
def test_a_full_disk_of_the_output(kind, code):
    """A script whose output is lost fails in a line; a run goes on and keeps its exit code."""
    with open("/dev/full", "w") as out:
        done = subprocess.run(
            [sys.executable, "-c", FULL_OUTPUT, kind],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == code, done.stderr
    said = "error: the output cannot be written: No space left on device\n"
    assert done.stderr == ("" if kind == "run" else said)


def test_a_closed_pipe_still_ends_a_run():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out, pytest.raises(BrokenPipeError):
        try:
            print("x", file=Lossy(out, pipes=False), flush=True)
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def test_scores_are_by_the_names_of_the_classes(tmp_path):
    """Counts, precision and recall by hand: 6 of 9 'no' were right, 1 of 2 'yes'; no 'maybe'."""
    classes_3C = np.array([[9, 0, 2], [7, 1, 3], [6, 0, 1]])
    row = by_label(classes_3C, ("no", "maybe", "yes"))
    assert row["eval_precision/no"] == 6 / 7 and row["eval_recall/no"] == 6 / 9
    assert row["eval_recall/maybe"] is None and row["eval_precision/maybe"] == 0
    assert row["eval_f1"] == pytest.approx((12 / 16 + 2 / 5) / 2)
    steps = [{"step": 1, "loss": 1.0, "step_time_s": 1, "tokens": 1}]
    lines = [*steps, {"step": 1, "eval_loss": 0.5, "eval_accuracy": 7 / 11} | row]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    figures = write_report(tmp_path, {"device": "x"}, None, labels=("no", "maybe", "yes"))
    summary = (tmp_path / "summary.md").read_text()
    assert "| 0 | no | 9 | 0.8571 | 0.6667 |\n| 1 | maybe | 0 | 0 | - |" in summary
    assert figures["labels"][2] == {
        "number": 2,
        "class": "yes",
        "examples": 2,
        "precision": 1 / 3,
        "recall": 0.5,
    }
    said: list[str] = []
    show_end(
        types.SimpleNamespace(say=said.append),
        figures | {"last_10_loss": 1.0},
        RunDir(tmp_path),
        None,
        ("no", "maybe", "yes"),
    )
    assert "  no: 9 examples held out, precision 85.7%, recall 66.7%" in said


def test_the_folder_of_a_run_is_named_by_what_differs(tmp_path, monkeypatch):
    """Short, bounded, the same for the same command, another for another."""
    monkeypatch.chdir(tmp_path)
    nano = PRESETS["nano"]()

    def named(**changes):
        cfg = config.override(nano, {k.replace("__", "."): v for k, v in changes.items()})
        path = run_path(cfg, "pretrain", "nano", nano)
        assert path == run_path(cfg, "pretrain", "nano", nano)
        assert path.parent.name == "pretrain" and len(path.name) <= 5 + 4 * 25 + 11 + 9
        assert re.fullmatch(r"nano(-[A-Za-z0-9._]+)*-[0-9a-f]{8}", path.name), path.name
        return path.name.rpartition("-")[0]

    assert named() == "nano"
    assert named(model__layers=2, optim__lr=0.001) == "nano-layers_2-lr_0.001"
    assert named(data__source="/some/where/My texts/") == "nano-source_My_texts"
    assert named(data__source="../a:0.7,b:0.3") == "nano-source_a_0.7_b_0.3"
    assert named(data__source="x/" + "y" * 300).endswith("y") and named(eval__prompt="/") != ""
    assert named(log__every=3, mesh__tensor=1, run_dir=None) == "nano"
    many = dict(model__layers=2, model__width=64, optim__lr=0.1, train__steps=7, train__seed=5)
    assert named(**many).endswith("-and_1_more")
    assert run_path(nano, "pretrain", "nano", nano) != run_path(
        config.override(nano, {"train.seed": 5}), "pretrain", "nano", nano
    )


def test_a_folder_without_words_from_before_is_continued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nano = PRESETS["nano"]()
    cfg = config.override(nano, {"model.layers": 2})
    former = run_path(cfg, "pretrain", "nano")
    assert "layers" not in former.name
    former.mkdir(parents=True)
    assert run_path(cfg, "pretrain", "nano", nano) == former
    former.rmdir()
    assert run_path(cfg, "pretrain", "nano", nano).name.startswith("nano-layers_2-")
