"""--detector=minder on the real trainer: four processes on four hosts, faults from outside of it.

A host is a control group with a share of the processors of its own, so that a busy process in it
slows this host and no other, as on a machine of its own.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.experiments.test_pretrain import ROOT, environment, home, rows
from tests.experiments.test_supervised import same

pytestmark = [pytest.mark.process, pytest.mark.slow]
__all__ = ["home"]  # the fixture, shared

GROUPS = pathlib.Path("/sys/fs/cgroup/cpu")
COUNTED = ("cpuacct", "memory")  # controllers that only count what a host uses
PERIOD_US = 50_000
SHARE = 0.25  # of a processor: four hosts on two, beside whatever else runs here
WEIGHT = 16_384  # of a host beside other work of this machine: it gets its share anyhow
SOON_S = 15
TOLD = ("hang", "slow", "minder")
MODEL = [
    "--model.layers=2",
    "--model.width=64",
    "--model.heads=4",
    "--model.kv_heads=4",
    "--model.head_width=16",
    "--model.mlp=256",
    "--train.global_batch=16",
    "--train.seq_len=128",
    "--eval.batches=0",
    "--eval.sample_tokens=0",
    "--log.tensorboard=false",
    "--emulate=1",
    "--checkpoint.every=25",
    "--checkpoint.keep=0",
    "--detector=minder",
]


class Job:
    """A driver and its agents, in a folder of their own. hosts: by name, with spares last."""

    def __init__(self, home, folder, steps, *flags, job=(), hosts=4, spares=0, share=None):
        self.folder, self.out = folder, folder / "out"
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        env = environment() | {
            "PYTHONPATH": str(ROOT),
            "MEGAJAX_TOKEN": "a secret of this test only",
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cold cache
        }
        # One thread of XLA a host, as its share of the processors is less than one.
        env["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        supervise = [sys.executable, str(ROOT / "scripts" / "supervise.py")]
        command = [
            sys.executable,
            str(ROOT / "experiments" / "pretrain.py"),
            *MODEL,
            f"--train.steps={steps}",
            f"--data.source={home}/text",
            f"--cache_dir={home}/cache",
            f"--run_dir={folder}",
            *job,
        ]
        self.names = [f"h{i}" for i in range(hosts + spares)]
        self.log = open(folder / "driver.log", "w")
        self.driver = subprocess.Popen(
            [
                *supervise,
                f"--hosts={hosts}",
                "--agents=elsewhere",
                f"--out={self.out}",
                f"--listen=127.0.0.1:{self.port}",
                "--start_s=600",
                "--backoff_s=0.1",
                "--period_s=0.5",
                "--detector=minder",
                *flags,
                "--",
                *command,
            ],
            stdout=self.log,
            stderr=self.log,
            env=env,
        )
        self.started = [self.driver]
        for name in self.names:
            words = [
                *supervise,
                f"--agent=127.0.0.1:{self.port}",
                f"--name={name}",
                "--period_s=0.5",
            ]
            self.start(name, words, share, env)

    def start(self, host, words, share, env=None):
        """Starts a process on a host."""
        if share is not None:
            group, *counted = self.groups(host)
            for folder in (group, *counted):
                folder.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
            (group / "cpu.shares").write_text(str(WEIGHT))
            enter = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in (group, *counted))
            words = ["sh", "-c", f'{enter}exec "$@"', "sh", *words]
        self.started.append(subprocess.Popen(words, env=env, start_new_session=True))

    def groups(self, host):
        """The folders of a host's control group, that of the processor first."""
        name = f"megajax-{os.getpid()}-{host}"
        return [GROUPS / name, *(GROUPS.parent / controller / name for controller in COUNTED)]

    def events(self, name=None):
        file = self.out / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [e for e in events if name in (None, e["event"])]

    def told(self):
        return [e for e in self.events("warning") if e["rule"] in TOLD]

    def step(self):
        with contextlib.suppress(OSError, StopIteration):
            lines = (self.out / "metrics.prom").read_text().splitlines()
            return int(next(x for x in lines if x.startswith("megajax_step ")).split()[1])
        return 0

    def team(self):
        """Hosts of the newest attempt, by rank."""
        return self.events("start")[-1]["message"].split(" on ")[1].split(", ")

    def pid(self, rank):
        """Of the training process of a rank in the newest attempt."""
        mark = f"--run_dir={self.folder}".encode()
        for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                env = (file.parent / "environ").read_bytes().split(b"\0")
                is_rank = f"JAX_PROCESS_ID={rank}".encode() in env
                if mark in file.read_bytes().split(b"\0") and is_rank:
                    return int(file.parent.name)
        raise AssertionError(f"rank {rank} does not run")

    def wait_for(self, condition, seconds=400):
        end = time.monotonic() + seconds
        while not (outcome := condition()):
            alive = self.driver.poll() is None
            assert time.monotonic() < end and alive, (self.folder / "driver.log").read_text()[
                -3000:
            ]
            time.sleep(0.2)
        return outcome

    def end(self, seconds=900):
        code = self.driver.wait(seconds)
        assert code == 0, (self.folder / "driver.log").read_text()[-3000:]

    def close(self):
        for process in reversed(self.started):
            process.kill()
            process.wait()
        self.log.close()
        time.sleep(1)  # for the reapers
        for folder in (folder for name in self.names for folder in self.groups(name)):
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def job(*args, **more):
    running = Job(*args, **more)
    try:
        yield running
    finally:
        running.close()


def test_a_host_with_a_busy_neighbour_is_evicted_and_the_run_ends_as_if_undisturbed(home):
    if not os.access(GROUPS, os.W_OK):
        pytest.skip("needs control groups of processors (version 1) that it may make")
    steps = 220
    with job(home, home / "hog-straight", steps) as straight:
        straight.end()
        assert not straight.told() and not straight.events("fault")
    flags = ("--minder.continuity_s=20",)
    with job(home, home / "hog", steps, *flags, spares=1, share=SHARE) as run:
        run.wait_for(lambda: run.step() >= 80)
        assert not run.told()  # a cold cache, a first compilation
        rank = 2
        host = run.team()[rank]
        for _ in range(2):
            run.start(host, [sys.executable, "-c", "while True: pass"], SHARE)
        run.wait_for(lambda: run.events("fault"))
        (alert,) = run.told()
        assert (alert["rule"], alert["ranks"], alert["hosts"]) == ("slow", [rank], [host])
        assert "cpu_wait_cores" in alert["message"]
        run.end()
        (fault,) = run.events("fault")
        assert (fault["rule"], fault["hosts"]) == ("slow", [host])
        assert len(run.events("told")) == 1 and (run.out / "blocklist").read_text() == f"{host}\n"
        first, second = (e["message"].split(" on ")[1].split(", ") for e in run.events("start"))
        (spare,) = set(run.names) - set(first)
        assert first[rank] == host and second[rank] == spare
        (eviction,) = json.loads((run.out / "evictions.json").read_text())["evictions"]
        assert (eviction["host"], eviction["verdict"]) == (host, "right"), eviction
        assert 1.05 * eviction["usual_s"] < eviction["slow_s"]
        page = (run.out / "attempt0" / "heat.html").read_text()
        assert "outline" in page and "its threads compute, or wait" in page
        metrics = (run.out / "metrics.prom").read_text()
        assert 'megajax_warnings_total{rule="slow"} 1' in metrics
        assert "megajax_rank_own_work_share{" in metrics
    same(home / "hog", home / "hog-straight", steps)


def test_a_stopped_and_a_killed_process_are_named_soon(home):
    flags = ("--min_hosts=4", "--max_restarts=5")
    with job(home, home / "stopped", 150, *flags, job=("--fault=pace=0.2@1:rank0",)) as run:
        run.wait_for(lambda: run.step() >= 10)
        stopped = time.time()
        os.kill(run.pid(1), signal.SIGSTOP)
        run.wait_for(lambda: run.events("fault"), 60)
        first = next(e for e in run.events() if e.get("hosts") and e["time"] > stopped)
        host = run.events("start")[0]["message"].split(" on ")[1].split(", ")[1]
        assert (first["ranks"], first["hosts"]) == ([1], [host]), first
        assert first["time"] - stopped <= SOON_S
        print(f"SIGSTOP named after {first['time'] - stopped:.1f} s by {first['rule']}")
        run.wait_for(lambda: len(run.events("start")) == 2 and run.step() >= 20)
        time.sleep(5)
        killed = time.time()
        os.kill(run.pid(3), signal.SIGKILL)
        fault = run.wait_for(lambda: run.events("fault")[1:], 60)[0]
        assert fault["ranks"] == [3] and fault["time"] - killed <= SOON_S
        print(f"kill -9 named after {fault['time'] - killed:.1f} s by {fault['rule']}")
        run.end()
        assert [e["ranks"] for e in run.told()] == [[1]]


def test_what_is_slow_and_no_fault_names_nobody(home):
    """A long evaluation on one rank, a disk that is slow for all, a cold cache, busy processors."""
    late = 18  # Gloo gives a peer 30 s
    faults = f"evaluate={late}@40:rank0,evaluate={late}@80:rank2," + ",".join(
        f"save={late}@{step}:rank{r}" for step in (50, 100) for r in range(4)
    )
    flags = ("--minder.continuity_s=20",)
    trained = ("--eval.every=40", "--eval.batches=1", f"--fault={faults}")
    with job(home, home / "reverse", 130, *flags, job=trained) as run:
        run.end()
        assert not run.told() and not run.events("fault")
        assert max(rows(run.folder)) == 130


def test_processes_without_a_driver_name_the_one_that_is_stopped(home):
    folder = home / "alone"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        str(ROOT / "experiments" / "pretrain.py"),
        *MODEL,
        "--train.steps=100000",
        f"--data.source={home}/text",
        f"--cache_dir={home}/cache",
        f"--run_dir={folder}",
    ]
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            env=environment()
            | {
                "PYTHONPATH": str(ROOT),
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "4",
                "JAX_PROCESS_ID": str(rank),
                "JAX_ENABLE_COMPILATION_CACHE": "false",
                "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            },
        )
        for rank in range(4)
    ]
    try:
        for line in started[0].stdout:
            if line.startswith("step 10/"):
                break
        time.sleep(5)
        os.kill(started[2].pid, signal.SIGSTOP)
        stopped, file = time.time(), folder / "minder.jsonl"
        alerts = []
        while not alerts and time.time() - stopped < 60:
            told = [json.loads(x) for x in file.read_text().splitlines()]
            alerts = [t for t in told if t["event"] == "alert"]
            time.sleep(0.2)
        assert alerts[0]["rule"] == "hang" and alerts[0]["ranks"] == [2], alerts
        print(f"SIGSTOP named after {alerts[0]['time'] - stopped:.1f} s without a driver")
        assert alerts[0]["time"] - stopped <= SOON_S
    finally:
        for process in started:
            process.kill()
            process.wait()
        started[0].stdout.close()
