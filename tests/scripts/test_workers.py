"""The parent of a GPU session, over workers that hang, crash and lie, none of which needs jax."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.gpu_session import session as workers

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
COMMAND = [sys.executable, "-S", str(Path(__file__).parent / "fake_worker.py")]
SMOKE = workers.Part("smoke", "kernels", {"items": {"peaks": "ok"}})


def part(name, alone=False, **items):
    more = {k: items.pop(k) for k in ("missing", "stuck") if k in items}
    return workers.Part(name, "kernels", {"items": items} | more, alone=alone)


def session(folder, parts, seconds=60.0, **options):
    """Returns the exit code, the rows by part and item, and the verdicts by part."""
    store = workers.Store(folder, "abc")
    code = workers.Session(COMMAND, store, time.monotonic() + seconds, **options).run(SMOKE, parts)
    return code, *read(folder)


def read(folder):
    rows, verdicts = (
        json.loads((folder / f"fake_gpu_1_{name}.json").read_text())["rows"]
        for name in ("kernels", "verdicts")
    )
    by_part = {}
    for row in rows:
        by_part.setdefault(row["part"], {})[row["item"]] = row
    return by_part, {row["part"]: row for row in verdicts}


def alive(pid):
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def group_alive(leader):
    """Whether a process of a group runs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group) == leader and state != "Z":
            return True
    return False


def test_whatever_a_part_does_the_others_are_measured(tmp_path, capsys, monkeypatch):
    """One that hangs, dies, leaves, is poisoned, lies, misses a package; each has its verdict."""
    monkeypatch.setattr(workers, "EXIT_S", 1)
    parts = [
        part("hangs", before="ok", bad="hang", after="ok"),
        part("dies", before="ok", bad="die", after="ok"),
        part("leaves", bad="leave", after="ok"),
        part("poisoned", bad="cuda", after="ok"),
        part("lies", bad="wrong", after="ok"),
        part("misses", missing="flax"),
        part("stuck", stuck=True, never="ok"),
        part("tiles", bad="hang in tile 1"),
        part("rival", rival="error", after="ok"),
        part("bad rivals", hung="rival hang", dead="rival die", poison="rival cuda", after="ok"),
        part("good", alone=True, one="ok", two="ok"),
        workers.Part("late", "kernels", {"items": {"slow to exit": "ok"}}, alone=False),
    ]
    code, rows, verdicts = session(tmp_path, parts)
    assert code == 1
    for name in ("hangs", "dies", "leaves", "poisoned", "lies"):
        assert rows[name]["after"]["value"] == 1, name
        assert verdicts[name]["finished"] and verdicts[name]["failed"], name
    words = {name: verdict["verdict"] for name, verdict in verdicts.items()}
    assert "bad: killed after 0.5 s in the stage 'run'" in words["hangs"]
    assert "bad: its process ended by signal 11" in words["dies"]
    assert "bad: its process ended with exit code 3" in words["leaves"]
    assert "bad: RuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS" in words["poisoned"]
    assert rows["poisoned"]["after"]["pid"] != rows["smoke"]["peaks"]["pid"]
    assert "bad is wrong" in words["lies"]
    assert "No module named 'flax'" in words["misses"] and not verdicts["misses"]["finished"]
    assert "in the stage 'build'" in words["stuck"] and verdicts["stuck"]["finished"]
    assert rows["tiles"]["bad"]["left_out"] == ["tile 1"] and not verdicts["tiles"]["failed"]
    assert rows["rival"]["rival"]["note"] == "ValueError: no such shape"
    assert words["rival"] == words["good"] == "2 items" and words["late"] == "1 items"
    # Three processes ended: what is left is given up, and the verdict says so.
    notes = {name: row["note"] for name, row in rows["bad rivals"].items()}
    assert notes.keys() == {"hung", "dead", "poison"} and rows["bad rivals"]["hung"]["side"] == 1
    assert notes["hung"] == "killed after 0.5 s in the stage 'run'"
    assert notes["dead"].startswith("its process ended by signal 11")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in notes["poison"]
    assert not verdicts["bad rivals"]["faults"]
    assert words["bad rivals"] == "failed (3 items): given up: its third process failed"
    log = (tmp_path / "log.txt").read_text()
    assert "said before it left" in log
    child = int(log.split("hanging with ")[1].split()[0])
    assert not alive(child)
    assert "hangs: failed (3 items)" in capsys.readouterr().out
    # What is finished is not begun again; the package is there now.
    before = (tmp_path / "fake_gpu_1_kernels.json").read_text()
    again = [p if p.name != "misses" else part("misses", it="ok") for p in parts]
    code, rows, verdicts = session(tmp_path, again)
    assert code == 1 and rows["misses"]["it"]["value"] == 1 and not verdicts["misses"]["failed"]
    former = [row for row in json.loads(before)["rows"] if row["part"] != "smoke"]
    assert all(rows[row["part"]][row["item"]] == row for row in former)
    code, rows, verdicts = session(tmp_path, [part("hangs", bad="ok")], again=True)
    assert code == 0 and set(rows["hangs"]) == {"bad"}


def test_the_log_and_what_a_killed_call_left_do_not_add_up(tmp_path, monkeypatch):
    """At most 8 files of 16 MiB come back."""
    monkeypatch.setattr(workers, "LOG_MOST", 1000)
    (tmp_path / "log.txt").write_text("old " * 300 + "new")
    (tmp_path / "fake_gpu_1_kernels.json.part").write_text("{")
    session(tmp_path, [part("good", one="ok")])
    log = (tmp_path / "log.txt").read_text()
    assert "new" in log and log.count("old") == pytest.approx(125, abs=2)
    assert not list(tmp_path.glob("*.part"))


def test_a_part_that_had_its_slice_goes_on_behind_the_others(tmp_path):
    slow = workers.Part("slow", "kernels", {"items": {"a": "slow", "b": "ok"}}, slice_s=0.01)
    code, rows, verdicts = session(tmp_path, [slow, part("short", alone=True, only="ok")])
    assert code == 0 and verdicts["slow"]["finished"]
    assert list(rows) == ["smoke", "slow", "short"]
    pids = [rows["slow"][item]["pid"] for item in "ab"]
    assert pids[0] != pids[1]


def test_what_the_end_of_the_time_cuts_off_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0.1)

    class Hasty(workers.Store):
        def add(self, part, item, rows):
            super().add(part, item, rows)
            if item == "last":
                ends._end = time.monotonic() + 0.3

    ends = workers.Session(COMMAND, Hasty(tmp_path, "abc"), time.monotonic() + 60)
    parts = [part("cut", last="ok", bad="stay"), part("late", alone=True, only="ok")]
    assert ends.run(SMOKE, parts) == 0
    _, verdicts = read(tmp_path)
    assert verdicts["cut"]["verdict"] == "unfinished, 1 items so far"
    assert not verdicts["cut"]["faults"] and not verdicts["late"]["finished"]
    code, rows, verdicts = session(tmp_path, [part("cut", last="ok", bad="ok"), parts[1]])
    assert code == 0 and verdicts["cut"]["verdict"] == "2 items" and verdicts["late"]["finished"]


def test_what_a_killed_session_measured_is_on_disk_and_no_worker_is_left(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]
from scripts.gpu_session import session as workers
parts = [workers.Part("p", "kernels", {{"items": {{"a": "ok", "b": "hang"}}}})]
first = workers.Part("smoke", "kernels", {{"items": {{"peaks": "ok"}}}})
store = workers.Store(Path({str(tmp_path)!r}), "abc")
workers.Session({COMMAND!r}, store, time.monotonic() + 60).run(first, parts)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    kernels, deadline = tmp_path / "fake_gpu_1_kernels.json", time.monotonic() + 30
    while not (kernels.exists() and '"a"' in kernels.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    worker = json.loads(kernels.read_text())["rows"][-1]["pid"]
    while group_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    code, rows, verdicts = session(tmp_path, [part("p", a="ok", b="ok")])
    assert code == 0 and rows["p"]["a"]["pid"] == worker != rows["p"]["b"]["pid"]


def test_without_a_device_nothing_is_begun(tmp_path, capsys):
    store = workers.Store(tmp_path, "abc")
    smoke = workers.Part("smoke", "kernels", {"refuse": True})
    ends = time.monotonic() + 60
    assert workers.Session(COMMAND, store, ends).run(smoke, [part("p", a="ok")]) == 1
    assert "error: there is no device here" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


def test_the_parent_loads_no_jax():
    code = f"import sys; sys.path.insert(0, {SCRIPTS!r}); import gpu_check, tune"
    code += "; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
