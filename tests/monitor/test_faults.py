"""Faults on purpose: the flag, who is struck and when, and what each does to a process."""

import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor import faults
from megajax.monitor.faults import DEEDS, KINDS, LATE, Fault, InjectedError, Injector, parse


def test_the_flag():
    assert parse(None) == parse("") == ()
    assert parse("kill@120:rank1, slow=0.5@3,nan@7:rank2:always,gil@1:attempt3") == (
        Fault("kill", 120, 1),
        Fault("slow", 3, 0, amount=0.5),
        Fault("nan", 7, 2, attempt=None),
        Fault("gil", 1, attempt=3),
    )
    assert all(parse(f"{kind}@1") for kind in KINDS)
    assert [parse(f"{kind}@1")[0].amount for kind in ("slow", "save", "kill")] == [0.12, 30, 0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kil@3", "Did you mean kill"),
        ("kill", "kind@step"),
        ("kill@x", "kind@step"),
        ("kill@3:1", "e.g. kill@120:rank1"),
        ("slow=1.2.3@4", "kind@step"),
    ],
)
def test_a_mistake_in_the_flag(spec, words):
    with pytest.raises(UserError, match=words):
        parse(spec)


def test_only_its_rank_its_step_and_its_attempt_are_struck():
    spec = parse("data@3:rank1")
    for rank, attempt in ((0, 0), (1, 1)):
        injector = Injector(spec, rank, attempt)
        assert [injector.strike(s, s) for s in range(1, 6)] == [1, 2, 3, 4, 5]
    injector = Injector(spec, 1, 0)
    injector.strike(2, None)
    with pytest.raises(InjectedError):
        injector.strike(3, None)
    with pytest.raises(InjectedError):
        Injector(parse("data@3:rank1:always"), 1, 7).strike(3, None)


def test_nan_reaches_one_parameter_and_keeps_its_sharding():
    x = jax.device_put(jnp.ones((4, 2)), jax.devices()[0])
    state = {"a": jnp.arange(3), "b": x, "c": jnp.ones(2)}
    out = Injector(parse("nan@2")).strike(2, state)
    assert np.isnan(out["b"]).all() and out["b"].sharding == x.sharding
    assert out["a"] is state["a"] and out["c"] is state["c"]


def test_slow_is_a_share_of_the_step(monkeypatch):
    now, slept = [0.0], []
    monkeypatch.setattr(faults.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    injector = Injector(parse("slow=0.5@3"))
    for step in range(1, 6):
        now[0] += 2 + sum(slept[-1:])
        injector.strike(step, None)
    assert slept == [1, 1, 1]


def test_a_section_takes_longer_once(monkeypatch):
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    injector = Injector(parse("save=7@3,evaluate=9@3,save=5@4:rank1"))
    for step in range(1, 6):
        assert injector.strike(step, step) == step
        for section in ("save", "evaluate"):
            injector.delay(section, step)
    assert slept == [7, 9]
    assert injector.expects("evaluate") and injector.expects("save", 3)
    assert not injector.expects("save", 4) and not injector.expects("kill")


@pytest.mark.parametrize(
    ("kind", "state"), [("kill", None), ("exit", None), ("stop", "T"), ("sleep", "S"), ("gil", "R")]
)
def test_what_a_fault_does_to_a_process(kind, state):
    code = f"from megajax.monitor.faults import *\nInjector(parse('{kind}@1')).strike(1, None)"
    victim = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert victim.stdout.readline() == f"injected fault: {kind} in step 1\n"
        if state is None:
            assert victim.wait(10) == {"kill": -signal.SIGKILL, "exit": 0}[kind]
        else:
            end = time.monotonic() + 10
            stat = pathlib.Path(f"/proc/{victim.pid}/stat")
            while stat.read_text().rsplit(")", 1)[-1].split()[0] != state:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert victim.poll() is None
    finally:
        victim.kill()
        victim.communicate()


def test_a_flood_does_not_stop_the_loop():
    code = (
        "from megajax.monitor.faults import *\nInjector(parse('flood@1')).strike(1, None)\n"
        "import sys, time; time.sleep(0.3); sys.stderr.write('done')"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", code + "; import os; os._exit(0)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = done.communicate(timeout=20)
    assert err == b"done" and len(out) > 10**6


def test_every_kind_has_its_deed():
    assert set(DEEDS) | {"nan", *LATE} == set(KINDS)


def test_faults_that_are_added_to_a_file_strike_in_the_next_step(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    mail = tmp_path / "mail"
    spec = parse(f"pace=0.5@3:rank1:always,@{mail}")
    assert spec[1] == Fault("file", 0, path=str(mail))
    ours, other, former = (Injector(spec, r, a) for r, a in ((1, 4), (0, 4), (1, 3)))
    assert [i.strike(1, None) for i in (ours, other, former)] == [None] * 3 and not slept
    mail.write_text("data@1:rank1:attempt4\ndata@1:ra")  # the second is not there yet
    with pytest.raises(InjectedError):
        ours.strike(2, None)
    for injector in (other, former, ours):  # it strikes once
        for step in (3, 4):
            injector.strike(step, None)
    assert slept == [0.5] * 4  # of rank 1, in each attempt
    with open(mail, "a") as file:
        file.write("nk0:attempt4\n")
    with pytest.raises(InjectedError):
        other.strike(5, None)
