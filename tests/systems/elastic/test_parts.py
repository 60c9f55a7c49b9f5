"""The parts of supervision alone: policy, self-checks, messages, journal, the agent's view."""

import errno
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import types

import pytest

from megajax.core.errors import SUPERSEDED
from megajax.monitor import heartbeat, meter, timeline
from megajax.monitor.alerts import Action
from megajax.systems.elastic import agent, checks, driver, reaper
from megajax.systems.elastic.agent import Output, Process
from megajax.systems.elastic.events import Journal
from megajax.systems.elastic.policy import EARLY, ELSEWHERE, POISON, Policy, Recovery, after
from megajax.systems.elastic.policy import ended as end_of
from megajax.systems.elastic.wire import Line


def fault(step, *hosts, rule="exit", kind="restart", cause="program", error="ValueError: x"):
    message = f"{rule} in {step}"
    return Action(kind, rule, message, (0,), hosts, step, cause=cause, error=error)


# ---- policy


@pytest.mark.parametrize(
    ("told", "trained", "kind", "rule"),
    [
        (False, False, "restart", "exit"),
        (False, True, "restart", "exit"),
        (True, True, "stop", "exit"),  # the last step may be stored
        (True, False, "stop", EARLY),
    ],
)
def test_a_fault_of_a_job_that_was_told_to_stop_ends_it(told, trained, kind, rule):
    end = end_of(fault(7, "a"), told, None, trained)
    assert (end.kind, end.rule, end.step) == (kind, rule, 7)
    assert end.hosts == (() if rule == EARLY else ("a",))
    done = Action("done", "end", "all ranks came to their end", code=143)
    assert end_of(done, told, None, trained) == done


def test_one_error_of_a_step_on_several_hosts_is_poison_and_progress_forgives():
    r = Recovery(Policy(strikes=9))
    first, second = (r.decide(fault(s, "a"), {}, "ab") for s in (7, 8))
    assert first.code is second.code is None
    assert not first.moves and second.moves == {"a"}  # so that another host tries it
    third = r.decide(fault(7, "b"), {}, "ab")
    assert third.code == POISON and "step 7 failed 3 times with the same error" in third.why
    assert "on a, b" in third.why and not third.excluded
    r = Recovery(Policy(strikes=9))  # the only host there is
    assert [r.decide(fault(7, "a"), {}, "a").code for _ in range(3)] == [None, None, POISON]
    r = Recovery(Policy(strikes=9))  # one host of two has it: another has to try the step
    assert [r.decide(fault(7, "a"), {}, "ab").code for _ in range(4)] == [None] * 4
    r = Recovery(Policy(strikes=9))  # what all show is seen on several hosts
    assert [r.decide(fault(7, "a", "b"), {}, "ab").code for _ in range(3)] == [None, None, POISON]
    r = Recovery(Policy(strikes=9))  # seen in either of two steps, because the loop is one ahead
    assert [r.decide(fault(s, "a"), {}, "a").code for s in (7, 20, 7, 20)] == [None] * 4


def test_no_other_fault_is_poison_however_often_one_step_has_it():
    for cause in ("other", "start", "stall"):
        r = Recovery(Policy(restarts=9, strikes=99))
        ends = [r.decide(fault(7, h, cause=cause), {}, "ab").code for h in "abababab"]
        assert ends == [None] * 8
    r = Recovery(Policy(restarts=9))  # other errors, or the same one on one host while others wait
    assert [r.decide(fault(7, h, error=h), {}, "abc").code for h in "abcabc"] == [None] * 6
    r = Recovery(Policy(restarts=9))
    assert [r.decide(fault(7, "a"), {}, "ab").code for _ in range(6)] == [None] * 6
    r = Recovery(Policy(restarts=9))  # kills between them prove nothing and hide nothing
    seen = [("program", 7), ("other", 3), ("program", 7), ("other", 8), ("program", 7)]
    codes = [r.decide(fault(s, "a", "b", cause=c), {}, "ab").code for c, s in seen]
    assert codes == [None] * 4 + [POISON]
    r = Recovery(Policy(restarts=9))  # the step was passed
    seen = [("program", 7), ("program", 7), ("other", 12), ("program", 7)]
    assert [r.decide(fault(s, "a", "b", cause=c), {}, "ab").code for c, s in seen] == [None] * 4


def test_a_disk_that_stays_full_ends_the_job_for_now():
    r = Recovery(Policy(restarts=9))
    assert r.decide(fault(20, "a", cause="other"), {}, "ab").code is None
    verdicts = [r.decide(fault(0, "a", cause="temporary"), {}, "ab") for _ in range(3)]
    assert [v.code for v in verdicts] == [None, None, ELSEWHERE]
    assert "3 attempts ended by a temporary error" in verdicts[-1].why and not verdicts[-1].excluded
    r = Recovery(Policy(restarts=9))  # it had room in between
    steps = (5, 9, 14, 20)
    assert [r.decide(fault(s, "a", cause="temporary"), {}, "ab").code for s in steps] == [None] * 4


def test_a_frozen_driver_costs_no_restart_unless_nothing_came_of_the_last():
    r = Recovery(Policy(restarts=2))
    frozen = [fault(s, rule="driver", cause="other") for s in (5, 9, 14, 20, 20, 20, 20)]
    codes = [r.decide(f, {}, "ab").code for f in frozen]
    assert codes == [None] * 6 + [ELSEWHERE] and r.restarts == 2


def test_every_end_says_how_the_run_goes_on():
    again = "scripts/supervise.py --hosts=2 -- train"
    assert after(75, again).endswith(f"start the command again: {again}")
    assert again in after(2, again) and again in after(70, again)
    assert "would fail in the same step" in after(70, again)
    assert again not in after(SUPERSEDED, again)


def test_waits_double_until_there_is_progress():
    r = Recovery(Policy(restarts=9, strikes=9, poison=9, backoff=2, longest=10))
    steps = (5, 5, 5, 5, 5, 9, 9)
    assert [r.decide(fault(s, "a"), {}, "ab").wait for s in steps] == [2, 4, 8, 10, 10, 2, 4]


def test_after_two_failures_of_a_step_memory_is_not_trusted():
    r = Recovery(Policy(strikes=9))
    seen = [r.decide(fault(s, "a"), {}, "ab").memory for s in (7, 8, 20)]
    assert seen == [True, False, True]


def test_restarts_run_out():
    r = Recovery(Policy(restarts=2, strikes=9))
    got = [r.decide(fault(10 * i, "a"), {}, "ab").code for i in range(1, 5)]
    assert got == [None, None, ELSEWHERE, ELSEWHERE]


def test_a_host_is_excluded_by_its_checks_by_strikes_or_by_hand():
    verdict = Recovery(Policy()).decide(fault(5, "a"), {"b": "disk: bad"}, "abc")
    assert verdict.code is None and verdict.excluded == {"b": "disk: bad"}
    r = Recovery(Policy(strikes=2))
    assert r.decide(fault(5, "a"), {}, "abc").excluded == {}
    assert r.decide(fault(50, "b"), {}, "abc").excluded == {}
    assert list(r.decide(fault(90, "a"), {}, "abc").excluded) == ["a"]
    r = Recovery(Policy(strikes=2))  # killed, frozen, silent, cut off: nothing that it did
    for step in range(5, 60, 9):
        verdict = r.decide(fault(step, "a", cause="other"), {}, "abc")
        assert not verdict.excluded and not verdict.moves
    r = Recovery(Policy(strikes=2))  # one error in one step may be the program's
    assert not any(r.decide(fault(5, "a"), {}, "abc").excluded for _ in range(4))
    for rule in ("evicted", "straggler"):
        verdict = Recovery(Policy()).decide(fault(5, "c", rule=rule, kind="evict"), {}, "abc")
        assert verdict.code is None and list(verdict.excluded) == ["c"]


def test_nobody_is_struck_for_what_all_show_and_the_last_host_is_kept():
    r = Recovery(Policy(strikes=1, poison=9))
    assert r.decide(fault(5, "a", "b"), {}, "ab").excluded == {}
    assert r.decide(fault(50, "a", rule="nan"), {}, "ab").excluded == {}
    assert r.decide(fault(90, "a"), {}, "a").excluded == {}
    r = Recovery(Policy(strikes=1, min_hosts=2))
    assert r.decide(fault(5, "a"), {}, "ab").excluded == {}
    assert r.decide(fault(50, "a"), {"a": "memory"}, "ab").code == ELSEWHERE


def test_what_cannot_work_is_not_tried_again():
    action = Action("stop", "usage", "flags", code=2)
    assert Recovery(Policy()).decide(action, {}, "ab").code == 2


# ---- self-checks


def test_a_healthy_host_passes(tmp_path):
    figures = checks.run(tmp_path)
    assert {"memory", "disk", "loopback"} <= set(figures)
    assert all(figures[k] > 0 for k in ("memory", "disk", "loopback"))
    assert list(tmp_path.iterdir()) == []
    assert checks.failing({"a": figures, "b": figures}, "ab") == {}


def test_a_disk_that_gives_other_bytes_back(tmp_path, monkeypatch):
    for quick in ("memory", "loopback"):
        monkeypatch.setattr(checks, quick, lambda: 1.0)
    read = pathlib.Path.read_bytes
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda p: bytes([read(p)[0] ^ 1]) + read(p)[1:])
    figures = checks.run(tmp_path)
    assert "other bytes" in figures["disk"] and list(tmp_path.iterdir()) == []
    assert checks.failing({"a": figures}, ()) == {"a": f"disk: {figures['disk']}"}
    # What says nothing about the host excludes nobody: a removed folder, a full disk.
    assert "disk" not in checks.run(tmp_path / "nowhere")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(checks, "disk", lambda folder: (_ for _ in ()).throw(full))
    assert "disk" not in checks.run(tmp_path)
    monkeypatch.setattr(checks, "disk", lambda folder: (_ for _ in ()).throw(OSError(5, "I/O")))
    assert "I/O" in checks.run(tmp_path)["disk"]


def test_hosts_are_compared_and_silence_is_an_answer():
    good = {"memory": 10.0, "disk": 100.0, "loopback": 295.0}
    slow = {"memory": 0.2, "disk": 90.0, "loopback": 295.0}
    all_ = {"a": good, "b": good, "c": slow, "d": None}
    blamed = checks.failing(all_, ("c",))
    assert list(blamed) == ["d", "c"] and blamed["c"].startswith("memory: 0.2")
    assert list(checks.failing(all_, ("a",))) == ["d"]  # the fault names another one
    assert checks.failing({"c": slow}, "c") == {}  # nobody to compare with
    assert checks.failing({"a": good, "c": slow}, "c") == {}  # nobody knows which is wrong


def test_speeds_are_compared_among_hosts_of_one_kind():
    good, weak = {"disk": 100.0}, {"disk": 12.0}
    hosts = {"a": good, "b": good, "c": good, "u": weak, "v": weak, "w": weak}
    kinds = {name: "L4" if name in "uvw" else "H100" for name in hosts}
    assert list(checks.failing(hosts, "abcuvw", {})) == ["u", "v", "w"]
    assert checks.failing(hosts, "abcuvw", kinds) == {}
    worse = hosts | {"u": {"disk": 2.0}}
    assert list(checks.failing(worse, "abcuvw", kinds)) == ["u"]
    del worse["v"], worse["w"]
    assert checks.failing(worse, "abcu", kinds) == {}  # the only one of its kind
    assert list(checks.failing(worse | {"u": {"disk": "I/O error"}}, (), kinds)) == ["u"]
    busy = good | {"loopback": 101.0}  # faster than any fault, however fast the others are
    fast = good | {"loopback": 2950.0}
    assert checks.failing({"a": fast, "b": fast, "c": busy}, "c") == {}


def test_one_disturbed_shot_of_the_loopback_says_nothing(monkeypatch):
    shots = iter([45.8, 295.0, 40.0, 290.0, 10.0])
    monkeypatch.setattr(checks, "_loopback", lambda: next(shots))
    assert checks.loopback() == 295.0


# ---- messages


def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        return a, server.accept()[0]


def test_messages_arrive_whole_in_pieces_or_together():
    a, b = pair()
    one, two = Line(a, "a secret of the job", True), Line(b, "a secret of the job", False)
    one._hello()
    for line in (two, one, two):
        assert line.receive() == []
    assert one.ready and two.ready
    sent = []
    one._write = sent.append
    for text in ("x" * 10, "y"):
        one.send({"text": text})
    raw = b"".join(sent)
    a.sendall(raw[:70])
    assert two.receive() == []
    a.sendall(raw[70:])
    assert two.receive() == [{"text": "x" * 10}, {"text": "y"}]
    one.close()
    with pytest.raises(ConnectionResetError):
        two.receive()
    two.close()


# ---- journal


def test_events_and_metrics(tmp_path):
    said = []
    journal = Journal(tmp_path / "out", said.append)
    journal.gauge(step=7)
    journal.event("fault", "rank 1: gone", rule="exit")
    journal.event("fault", "rank 1: gone", rule="exit")
    journal.event("checked", results={})
    journal.exclude("a", "bad disk")
    journal.close()
    rows = [json.loads(x) for x in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [r["event"] for r in rows] == ["fault", "fault", "checked", "excluded"]
    assert said[-1] == "[supervise] excluded: a: bad disk" and len(said) == 3
    metrics = (tmp_path / "out" / "metrics.prom").read_text()
    assert 'megajax_faults_total{rule="exit"} 2\n' in metrics and "megajax_step 7\n" in metrics
    assert (tmp_path / "out" / "blocklist").read_text() == "a\n"
    assert [r["clock"] for r in rows] == sorted(r["clock"] for r in rows)


def test_a_disk_that_takes_nothing_costs_the_evidence_and_not_the_job(tmp_path, monkeypatch):
    said = []
    journal = Journal(tmp_path / "out", said.append)
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as m:
        m.setattr(os, "write", lambda file, data: (_ for _ in ()).throw(full))
        m.setattr(pathlib.Path, "write_text", lambda *_: (_ for _ in ()).throw(full))
        journal.event("fault", "rank 1: gone", rule="exit")
        journal.evidence(0, {0: "stack"}, {}, {}, {}, None)
        journal.report("why")
    assert sum("cannot write" in text for text in said) == 1
    journal.event("end")
    journal.close()
    (row,) = [json.loads(x) for x in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert (row["event"], row["lost"]) == ("end", 4)
    assert journal.lost == 0


def test_time_is_counted_by_a_clock_that_nobody_sets():
    events = [{"time": 90_000.0, "clock": 1.0}, {"time": 3610.0, "clock": 21.0}]
    assert timeline.elapsed(events) == 21.0
    assert timeline.elapsed(events * 2) == 42.0  # a second driver wrote on
    assert timeline.elapsed([{"time": 5.0}, {"time": 9.0}]) == 4.0


# ---- the agent's view


def ended(tmp_path, code):
    popen = subprocess.Popen([sys.executable, "-c", code])
    popen.wait()
    return Process(0, popen, tmp_path / "progress", Output(tmp_path / "log"))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("", 0),
        ("exit(3)", 3),
        ("exit(137)", -9),
        ("exit(143)", 143),
        ("import os; os.kill(os.getpid(), 11)", -11),
    ],
)
def test_exit_codes_of_wrappers_are_read_as_signals(tmp_path, code, shown):
    p = ended(tmp_path, code)
    assert p.code() == shown and p.state() == "X"
    os.close(p.output.writer)
    p.output.close()


def test_logs_are_searched_once_line_by_line_and_not_for_ever(tmp_path):
    p = ended(tmp_path, "")
    p.output.follow()
    with open(p.output.writer, "w") as log:
        log.write("fine\nNVRM: Xid (PCI:0000:3b:00): 79\nhalf of a CUDA_ER")
        log.flush()
        assert p.words(p.output.new_text()) == ["NVRM: Xid (PCI:0000:3b:00): 79"]
        log.write("ROR: launch failed\n")
        log.flush()
        assert p.words(p.output.new_text()) == ["half of a CUDA_ERROR: launch failed"]
        log.write(100 * "out of memory\n")
        log.flush()
        assert len(p.words(p.output.new_text())) == agent.LINES - 2
        log.write("x" * (agent.NEWEST_BYTES + 100) + "\n")
        log.flush()
        assert len(p.output.new_text()) == agent.NEWEST_BYTES
    p.output.close()
    assert p.output.total == p.output.log.stat().st_size and not p.output.missing()


def test_the_reaper_ends_groups_and_removes_folders_when_its_input_ends(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    doomed, spared = (subprocess.Popen(sleep, start_new_session=True) for _ in range(2))
    process = subprocess.Popen([sys.executable, reaper.__file__], stdin=subprocess.PIPE, text=True)
    try:
        lines = f"folder {folder}\ngroup {doomed.pid}\ngroup {spared.pid}\nreaped {spared.pid}\n"
        process.communicate(lines, timeout=10)
        assert doomed.wait(5) == -9 and not folder.exists()
        time.sleep(0.05)
        assert spared.poll() is None
    finally:
        for p in (doomed, spared):
            p.kill()
            p.wait()


def test_folders_of_dead_agents_are_removed_and_no_others(tmp_path, monkeypatch):
    code = "import sys, pathlib; from megajax.monitor import heartbeat\n"
    code += (
        "folder, _ = heartbeat.claim_folder(pathlib.Path(sys.argv[1])); print(folder, flush=True)\n"
    )
    dead = subprocess.Popen(
        [sys.executable, "-c", code + "import time; time.sleep(60)", tmp_path],
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs = pathlib.Path(dead.stdout.readline().strip())
    (theirs / "memory0").write_bytes(bytes(100))
    folder, lock = heartbeat.claim_folder(tmp_path)
    assert heartbeat.sweep_folders(tmp_path) == []  # all are young
    monkeypatch.setattr(heartbeat, "YOUNG_S", -1)
    assert heartbeat.sweep_folders(tmp_path) == [] and theirs.exists()
    dead.kill()
    dead.communicate()
    assert heartbeat.sweep_folders(tmp_path) == [theirs] and not theirs.exists()
    assert folder.exists()
    os.close(lock)


def test_traffic_counts_this_machines_network():
    before = meter.traffic()
    a, b = pair()
    a.sendall(os.urandom(50_000))
    b.recv(50_000, socket.MSG_WAITALL)
    a.close()
    b.close()
    assert meter.traffic() - before >= 50_000


@pytest.mark.slow
def test_the_check_of_gpus_runs_on_any_devices_and_sees_a_wrong_product(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert checks.gpu() > 0
    monkeypatch.setattr(checks, "GPU_CHECK", checks.GPU_CHECK.replace("n / 4", "n / 5"))
    with pytest.raises(ValueError, match="AssertionError"):
        checks.gpu()


@pytest.mark.parametrize("local", [False, True])
def test_a_driver_says_now_and_then_whom_it_awaits(local, monkeypatch):
    """Agents of other machines at once; this machine's, which come by themselves, after a while."""
    monkeypatch.setattr(driver, "WAITING_S", 0.06)
    said = []

    class Owner:
        def on_wait(self, seconds):
            said.append(seconds)

        def on_refused(self, *words):
            """Nobody is."""

    idle = types.SimpleNamespace(poll=lambda: None, wait=lambda seconds: None)
    listener = socket.create_server(("127.0.0.1", 0))
    hosts = driver.Hosts(Owner(), listener, "token", (lambda name: idle) if local else None, 2)
    monkeypatch.setattr(hosts, "pump", lambda: time.sleep(0.01))
    assert not hosts.gather(2, 1, 0.2, lambda: False)
    hosts.close()
    assert len(said) >= 2 and said == sorted(said, reverse=True)
    assert (said[0] < 0.15) if local else (0.15 < said[0] <= 0.2)


@pytest.mark.parametrize(("end", "code"), [("", None), ("\n", -9)])
def test_a_reaper_takes_no_half_line_for_a_group(end, code):
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as group:
        words = [sys.executable, "-S", "-E", reaper.__file__]
        subprocess.run(words, input=f"group {group.pid}{end}", text=True, check=True)
        try:
            assert (group.wait(10) if end else group.poll()) == code
        finally:
            group.kill()
