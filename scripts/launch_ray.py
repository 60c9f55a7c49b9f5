"""A training job on a Ray cluster: one process a host, restarted together when one fails.

    uv run --extra ray scripts/launch_ray.py --hosts=4 --gpus=8 --preset=llama3_8b --mesh.tensor=8

Flags that are not this script's go to experiments/pretrain.py, which must lie in the same place on
every host. Ctrl-C or SIGTERM here reaches every process: the run saves, and the same command
continues it. After a failure all processes are started again, at most --restarts times. They are
not started again after wrong flags (exit code 2) and when another run has taken over (76), but they
are when the last save failed (75). With --supervise, scripts/supervise.py restarts the processes
instead: its driver runs here and an agent on every host, and it also finds processes that hang.

    uv run --extra ray scripts/launch_ray.py --kinds=h100:2x8,l4:4x8 --precisions=FILE ...

--kinds is for a job on unlike GPUs: 2 hosts of 8 H100s and 4 hosts of 8 L4s. A kind is placed on
nodes with the resource accelerator_type:NAME, in capitals, which Ray gives to nodes with GPUs that
it knows, and `ray start --resources` to others. Each process gets --kind=NAME. With --supervise all
processes run one command without it, and the file must name kinds as their cards.
"""

import megajax.core.interrupted  # noqa: F401

import argparse
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megajax.core.errors import SUPERSEDED

TRAINER = Path(__file__).resolve().parent.parent / "experiments" / "pretrain.py"
SUPERVISE = Path(__file__).resolve().parent / "supervise.py"
GRACE_S = 600  # (chosen) for the last checkpoint of a run that is told to stop
LOST_S = 30  # (chosen) for the others to leave by themselves once one has failed


def environment(coordinator: str, hosts: int, host: int) -> dict[str, str]:
    """Returns what core.mesh reads in the process of a host."""
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(hosts),
        "JAX_PROCESS_ID": str(host),
    }


class Kind(NamedTuple):
    """Hosts of one kind. name: of the kind of their GPUs; None: all hosts of the job are alike."""

    name: str | None
    hosts: int
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """What a host takes of a Ray node. The resource of a kind is there once a node."""
        resource = {} if self.name is None else {f"accelerator_type:{self.name.upper()}": 0.001}
        return {"CPU": 1, "GPU": self.gpus, **resource}

    @property
    def flags(self) -> list[str]:
        """The trainer's flags that are those of this kind alone."""
        return [] if self.name is None else [f"--kind={self.name}"]


def kinds_of(settings: argparse.Namespace) -> list[Kind]:
    """Returns the kinds of hosts. Raises: ValueError for words of another form."""
    if settings.kinds is None:
        return [Kind(None, settings.hosts or 1, 8 if settings.gpus is None else settings.gpus)]
    words = [re.fullmatch(r"([\w.-]+):(\d+)x(\d+)", w) for w in settings.kinds.split(",")]
    kinds = [Kind(w[1], int(w[2]), int(w[3])) for w in words if w is not None]
    names = {kind.name for kind in kinds}
    if len(names) < len(words) or any(kind.hosts < 1 for kind in kinds):
        raise ValueError(
            f"kinds={settings.kinds} must be different names with hosts and GPUs of a host, such "
            "as h100:2x8,l4:4x8 (--kinds)"
        )
    return kinds


def jobs(
    coordinator: str, places: Sequence[Kind], flags: Sequence[str]
) -> list[tuple[list[str], dict[str, str]]]:
    """Returns (command, environment) of the process of each host. places: the kinds of hosts."""
    trainer = [sys.executable, str(TRAINER), "--told_code=143", *flags]
    return [
        ([*trainer, *kind.flags], environment(coordinator, len(places), i))
        for i, kind in enumerate(places)
    ]


class Host:
    """The process of one host; a Ray actor where there is Ray."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._process: subprocess.Popen | None = None

    def address(self) -> str:
        """Returns this host's address with a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 1))  # sends nothing: it asks which way packets leave
            return f"{probe.getsockname()[0]}:{port}"

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts the process.

        Without SLURM's variables, should Ray itself run there: jax would read from them that there
        is one process a GPU.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        self._process = subprocess.Popen(command, env=inherited | dict(env))

    def code(self) -> int | None:
        """Returns the exit code as a shell has it, None while the process runs."""
        assert self._process is not None
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def send(self, number: int) -> None:
        """Sends a signal to a process that still runs."""
        if self.code() is None:
            assert self._process is not None
            self._process.send_signal(number)


def run_once(each: Callable[..., list[Any]], asked: Callable[[], bool], pause_s: float) -> int:
    """Waits for started processes. Returns 0, or the exit code of the one that failed first.

    each(method, *args): calls a method of all Hosts and returns what they say. asked: whether to
    stop. The processes of a job cannot go on without one another, so the rest are ended too.
    """
    failed, told, deadline = 0, False, float("inf")
    while None in (codes := each("code")):
        failed = failed or next((c for c in codes if c), 0)
        if asked() and not told:
            told, deadline = True, time.monotonic() + GRACE_S
            each("send", signal.SIGTERM)
        elif failed and deadline == float("inf"):
            deadline = time.monotonic() + LOST_S
        if time.monotonic() > deadline:
            each("send", signal.SIGKILL)
        time.sleep(pause_s)
    return failed or next((c for c in codes if c), 0)


def supervise(
    each: Callable[..., list[Any]],
    start: Callable[[], None],
    asked: Callable[[], bool],
    restarts: int,
    pause_s: float = 1.0,
) -> int:
    """Runs the job until it is done, told to stop, wrong or out of restarts. Returns its code."""
    for attempt in range(restarts + 1):
        start()
        code = run_once(each, asked, pause_s)
        if code in (0, 2, SUPERSEDED) or asked():
            return code
        print(f"exit code {code}; {restarts - attempt} restarts left", file=sys.stderr)
    return code


def supervise_progress(
    each: Callable[..., list[Any]],
    command: Sequence[str],
    hosts: int,
    asked: Callable[[], bool],
    settings: Sequence[str] = (),
    pause_s: float = 1.0,
) -> int:
    """Runs a driver here and an agent on every Host. Returns the driver's exit code.

    settings: flags of scripts/supervise.py, e.g. --max_restarts=5.
    """
    address = Host().address()
    env = {"MEGAJAX_TOKEN": secrets.token_hex(16)}
    listen = f"0.0.0.0:{address.rpartition(':')[2]}"
    driver = subprocess.Popen(
        [
            sys.executable,
            str(SUPERVISE),
            "--agents=elsewhere",
            f"--hosts={hosts}",
            f"--listen={listen}",
            *settings,
            "--",
            *command,
        ],
        env=os.environ | env,
    )
    each("start", [sys.executable, str(SUPERVISE), f"--agent={address}"], env)
    told = False
    while driver.poll() is None:
        if asked() and not told:
            told = True
            driver.send_signal(signal.SIGTERM)
        time.sleep(pause_s)
    return driver.returncode


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns (this script's settings, the trainer's flags)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hosts", type=int, help="number of hosts, with one process each; [1]")
    parser.add_argument("--gpus", type=int, help="GPUs of each host; [8]")
    parser.add_argument(
        "--kinds",
        metavar="NAME:HOSTSxGPUS,...",
        help="in place of --hosts and --gpus: the hosts of each kind of GPU",
    )
    parser.add_argument("--address", default="auto", help="address of the Ray cluster")
    parser.add_argument("--restarts", type=int, default=3, help="most restarts of the job")
    parser.add_argument(
        "--supervise", action="store_true", help="also find hangs, and exclude bad hosts"
    )
    settings, flags = parser.parse_known_args(argv)
    for name, least in (("hosts", 1), ("gpus", 0), ("restarts", 0)):
        value = getattr(settings, name)
        if value is not None and value < least:
            parser.error(f"{name}={value} must be at least {least} (--{name})")
        if value is not None and settings.kinds is not None and name != "restarts":
            parser.error(f"{name}={value} and kinds={settings.kinds}: leave one out (--{name})")
    try:
        kinds_of(settings)
    except ValueError as error:
        parser.error(str(error))
    return settings, flags


def main(argv: Sequence[str]) -> int:
    """Starts a Host on every machine and watches them. Returns the exit code."""
    settings, flags = parse(argv)
    try:
        import ray  # type: ignore[import-not-found]
        from ray.util.placement_group import placement_group  # type: ignore[import-not-found]
        from ray.util.scheduling_strategies import (  # type: ignore[import-not-found]
            PlacementGroupSchedulingStrategy,
        )
    except ImportError:
        print("error: launch_ray needs the package: uv sync --extra ray", file=sys.stderr)
        return 2
    ray.init(address=settings.address)
    places = [kind for kind in kinds_of(settings) for _ in range(kind.hosts)]
    group = placement_group([kind.bundle for kind in places], strategy="STRICT_SPREAD")
    ray.get(group.ready())
    actor = ray.remote(Host)
    hosts = [
        actor.options(
            num_cpus=1,
            num_gpus=kind.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, i),
        ).remote()
        for i, kind in enumerate(places)
    ]

    def each(method: str, *args: Any) -> list[Any]:
        return ray.get([getattr(h, method).remote(*args) for h in hosts])

    def start() -> None:
        coordinator = ray.get(hosts[0].address.remote())
        started = zip(hosts, jobs(coordinator, places, flags), strict=True)
        ray.get([host.start.remote(*job) for host, job in started])

    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    if settings.supervise:
        options = [f"--max_restarts={settings.restarts}"]
        command = [sys.executable, str(TRAINER), *flags]
        return supervise_progress(each, command, len(hosts), lambda: bool(signals), options)
    return supervise(each, start, lambda: bool(signals), settings.restarts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
