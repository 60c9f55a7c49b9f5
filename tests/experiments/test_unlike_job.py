"""A job of two processes on unlike devices: faults, signals, resumes, and what it refuses.

The weak process has products in few bits and is played at half the strong one's rates. That all
replicas hold the same bits is tests/training/test_unlike_processes.py.
"""

import re
import shutil
import signal
import socket
import time

import pytest

from megajax.quant import Precisions
from tests import forks
from tests.experiments.test_pretrain import environment, home, last_step, rows, wait_for
from tests.experiments.test_supervised import (
    STEPS,
    TINY,
    events,
    nothing_is_left,
    same,
    supervise,
)

pytestmark = [pytest.mark.process, pytest.mark.slow]
__all__ = ["home"]  # the fixture, shared

PRODUCTS = tuple("attention.query attention.key attention.value attention.out".split())
PRODUCTS += ("mlp.gate", "mlp.up", "mlp.down")
RATES = "--play=float32:0.4,float16:0.2,int8:0.2"
REFUSED_S = 60.0  # in which every process of a job that is refused must have ended


def row(of, layers=1):
    return {f"blocks.{i}.{name}": of(name) for i in range(layers) for name in PRODUCTS}


@pytest.fixture(scope="module")
def files(home):
    """Paths by name: a plan, another one, one of another model, one of another job, and none."""
    strong = row(lambda name: "float32")
    weak = row(lambda name: "int8" if name.startswith("mlp") else "float16")
    plans = {
        "plan": {"strong": strong, "weak": weak},
        "other": {"strong": strong, "weak": row(lambda name: "float16")},
        "model": {"strong": row(lambda name: "float32", 2), "weak": row(lambda name: "int8", 2)},
        "lack": {"strong": strong},
    }
    paths = {name: home / f"{name}.json" for name in (*plans, "damaged")}
    for name, kinds in plans.items():
        Precisions(kinds).save(paths[name])
    paths["damaged"].write_text(paths["plan"].read_text()[:-3])
    return paths


def on(file, kinds="strong,weak"):
    return ["--mesh.data=2", f"--precisions={file}", f"--kind={kinds}"]


def start(home, folder, flags, each=((), ())):
    """Starts as many processes as `each` has flags for, and `flags` for all."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    env = environment() | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(len(each))}
    fixed = [*TINY, f"--data.source={home}/text", f"--cache_dir={home}/cache"]
    return [
        forks.start(
            "experiments/pretrain.py",
            *fixed,
            f"--run_dir={folder}",
            *flags,
            *more,
            env=env | (job | {"JAX_PROCESS_ID": str(rank)} if len(each) > 1 else {}),
        )
        for rank, more in enumerate(each)
    ]


def finish(job, seconds=300):
    """Waits. Returns (exit code, what was written) of each process."""
    try:
        return [(process.wait(seconds), "".join(process.written())) for process in job]
    finally:
        for process in job:
            process.kill()


@pytest.fixture(scope="module")
def straight(home, files):
    """A run that nobody disturbs, whose weak process takes twice as long, raises no alarm."""
    folder = home / "straight"
    flags = [*on(files["plan"]), RATES, "--detector=minder"]
    job = supervise(home, folder, *flags, options=["--detector=minder"])
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 0, out
    assert not events(folder, "fault") and not events(folder, "warning"), out
    assert "precision: strong: 7 float32; weak: 3 int8, 4 float16" in out
    return folder


def test_either_process_is_killed_and_the_weak_one_stops(home, files, straight):
    folder = home / "faults"
    faults = "--fault=kill@6:rank1,kill@11:rank0:attempt1,stop@17:rank1:attempt2"
    flags = [*on(files["plan"]), RATES, "--detector=minder", faults]
    job = supervise(home, folder, *flags, options=["--detector=minder"])
    out, _ = job.communicate(timeout=600)
    assert job.returncode == 0, out
    stops = [(f["rule"], f["ranks"]) for f in events(folder, "fault")]
    assert stops == [("exit", [1]), ("exit", [0]), ("stopped", [1])], out
    nothing_is_left(folder)
    same(folder, straight)


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)], ids=["both", "strong", "weak"])
def test_ctrl_c_saves_and_the_run_goes_on(home, files, straight, ranks):
    """The same command, one process that plays both kinds, other kinds, or one kind."""
    folder = home / f"stopped{len(ranks)}{ranks[0]}"
    slow = "--play=float32:0.01,float16:0.01,int8:0.01"
    job = start(home, folder, [*on(files["plan"]), slow])
    wait_for(job[0], lambda: last_step(folder) >= 4)
    for rank in ranks:
        job[rank].send_signal(signal.SIGINT)
    ends = finish(job)
    assert [code for code, _ in ends] == [130 if rank in ranks else 0 for rank in (0, 1)], ends
    assert "saved. Continue with:" in ends[0][1] and f"--run_dir={folder}" in ends[0][1], ends
    done = last_step(folder)
    assert 4 <= done < STEPS
    plan, other = files["plan"], files["other"]
    ways = {
        "same": (on(plan), ((), ()), f"  play: {slow.partition('=')[2]} -> None"),
        "one": (["--emulate=2", *on(plan)], ((),), "  emulate: 1 -> 2"),
        "other": (on(other), ((), ()), f"  precisions: {plan} -> {other}"),
        "plain": (["--mesh.data=2"], ((), ()), f"  precisions: {plan} -> None"),
    }
    for name in ways if len(ranks) == 2 else ("same",):
        flags, each, says = ways[name]
        copy = home / f"{folder.name}_{name}"
        shutil.copytree(folder, copy)
        ends = finish(start(home, copy, flags, each))
        assert {code for code, _ in ends} == {0}, ends
        assert f"resumed after step {done} " in ends[0][1] and says in ends[0][1], ends
        want, got = ({s: r["loss"] for s, r in rows(f).items()} for f in (straight, copy))
        assert all(got[s] == want[s] for s in range(1, done + 1))
        if name in ("same", "one"):
            assert got == want
        else:
            assert got != want and got[STEPS] == pytest.approx(want[STEPS], rel=1e-2)


REFUSED = {
    # flags of the strong process, of the weak one, what both say
    "lack": ("--precisions={lack}", "--precisions={lack}", "process 1: .*no kind 'weak', it has s"),
    "damaged": ("--precisions={plan}", "--precisions={damaged}", "process 1: .* is not JSON"),
    "gone": ("--precisions={plan}", "--precisions={plan}.gone", "process 1: cannot read .*gone"),
    "unlike": ("--precisions={plan}", "--precisions={other}", "process 1 .kind weak. has another"),
    "none": ("--precisions={plan}", "", "process 1 has no --precisions, others have"),
    "model": ("--precisions={model}", "--precisions={model}", "is of another model: of kind str"),
    "play": ("--precisions={plan}", "--precisions={plan} --play=int8:1", "no rate of float16"),
    "check": ("--precisions={plan}", "--precisions={plan} --shard.zero=full", "=full: the weights"),
    "optimizer": (
        "--precisions={plan}",
        "--precisions={plan} --optim.name=sgd",
        "the programs of the kinds of devices differ from collective [0-9]+ on",
    ),
    "clip": (
        "--precisions={plan}",
        "--precisions={plan} --optim.clip=0",
        "differ from collective [0-9]+ on.*: strong .process 0.: all-reduce.*; weak .process 1.: ",
    ),
    "accumulate": (
        "--precisions={plan}",
        "--precisions={plan} --train.accumulate=2",
        "differ from collective [0-9]+ on.*: strong .process 0.: .*; weak .process 1.: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_processes_refuse_together(home, files, case):
    *each, says = REFUSED[case]
    each = [words.format(**files).split() for words in each]
    each = [
        [*words, f"--kind={kind}"] if words else ["--shard.zero=optimizer"]
        for words, kind in zip(each, ("strong", "weak"), strict=True)
    ]
    folder = home / f"refused_{case}"
    began = time.monotonic()
    ends = finish(start(home, folder, ["--mesh.data=2"], each), REFUSED_S)
    assert time.monotonic() - began < REFUSED_S
    for code, text in ends:
        assert code == 2 and "Traceback" not in text, ends
        assert re.search(f"error: .*{says}", text), ends
    assert not rows(folder)
