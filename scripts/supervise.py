"""Supervises a training command: finds what is dead, stuck or sick, and goes on without it.

    uv run scripts/supervise.py --hosts=1 --processes=2 --max_restarts=5 -- \\
        uv run experiments/pretrain.py --emulate=4 --checkpoint.every=50

starts the driver and, on this machine, one agent for each of --hosts; each agent starts --processes
of the command, which form one job. After a fault all are ended, the hosts check themselves, and the
same command goes on from its newest good checkpoint. The folder --out gets events.jsonl,
metrics.prom (Prometheus), blocklist, and for each attempt the logs and, after a fault, the stacks
of all ranks.

On a cluster the agents are started by what starts processes there, never by this script:

    MEGAJAX_TOKEN=... supervise.py --agents=elsewhere --listen=0.0.0.0:8475 --hosts=4 -- COMMAND
    MEGAJAX_TOKEN=... srun supervise.py --agent=FIRST_HOST:8475          (one a host; spares too)

SUPERVISE=1 scripts/launch_slurm.sh does so.

Where the time went (ETTR), and a heat map of the ranks as a PNG:

    supervise.py --report --out=FOLDER --run_dir=RUN

Take a host out by hand, from where the driver runs: supervise.py --evict=HOST --out=FOLDER

Exit codes: 0 done; 2 the command cannot work; 70 one step failed again and again (do not retry);
75 too few good hosts or restarts (retry elsewhere, without the blocklist); 143 told to stop, saved.
"""

import megajax.core.interrupted  # noqa: F401

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megajax.core.errors import UserError
from megajax.core.limits import Limits as Range
from megajax.core.limits import check_number
from megajax.monitor import ettr, timeline
from megajax.monitor.heartbeat import Span
from megajax.monitor.reports import Limits
from megajax.monitor.sinks import read_jsonl
from megajax.systems.elastic.agent import Agent
from megajax.systems.elastic.driver import Driver, Settings
from megajax.systems.elastic.events import Journal
from megajax.systems.elastic.policy import Policy
from megajax.systems.elastic.wire import dial

# What a number may be, by its flag.
RANGES = {
    **dict.fromkeys(("hosts", "processes"), Range(at_least=1)),
    **dict.fromkeys(
        ("spares", "max_restarts", "backoff_s", "join_s", "grace_s"), Range(at_least=0)
    ),
    **dict.fromkeys(
        ("start_s", "step_s", "save_s", "evaluate_s", "silence_s", "period_s"),
        Range(above=0),
    ),
}


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Returns (settings, the command behind '--'). Raises: UserError."""
    own = list(argv)
    command: list[str] = []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--hosts", type=int, default=1, help="hosts that work at a time")
    add("--processes", type=int, default=1, help="processes of the command on each host")
    add("--spares", type=int, default=0, help="hot spares: agents of this machine beyond --hosts")
    add("--min_hosts", type=int, help="go on with as few; default: --hosts")
    add("--max_restarts", type=int, default=5, help="of the whole job")
    add("--backoff_s", type=float, default=1.0, help="pause before a restart; doubles when idle")
    add("--straggler", choices=("warn", "evict"), default="warn",
        help="what to do about a rank that is slower than the others; evict: save, and go on "
        "without its host where enough others are there; [%(default)s]")  # fmt: skip
    add("--join_s", type=float, default=600.0, help="time for agents and driver to meet")
    add("--grace_s", type=float, default=600.0, help="time to save after SIGTERM")
    for name, what in (
        ("start", "until the first step, and for each of two that compile"),
        ("step", "in any section of a step"),
        ("save", "in a save"),
        ("evaluate", "in an evaluation, and at the end"),
        ("silence", "of an agent, or of a stopped process"),
    ):
        default = getattr(Limits, name)
        add(f"--{name}_s", type=float, default=default, help=f"longest time {what}; [{default:g}]")
    add("--period_s", type=float, default=1.0, help="between the reports of an agent")
    add("--out", help="folder of events, logs and evidence; default: runs/supervised/<time>")
    add("--listen", default="127.0.0.1:0", help="host:port of the driver")
    add("--agents", choices=("here", "elsewhere"), default="here", help="who starts the agents")
    add("--agent", metavar="HOST:PORT", help="be the agent of this host, for that driver")
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())  # as a blocklist must have it
    add("--name", default=name, help="of this host, as an agent; [%(default)s]")
    add("--grid", help="of all devices, for pictures, e.g. pipe=2,data=4,tensor=8")
    add("--report", action="store_true", help="say where the time of --out and --run_dir went")
    add("--run_dir", help="of the training run, for --report")
    add("--evict", metavar="HOST", help="tell the driver of --out to go on without this host")
    settings = parser.parse_args(own)
    for name, range_ in RANGES.items():
        check_number(name, name, getattr(settings, name), range_, parser.get_default(name))
    if settings.min_hosts is not None and not 1 <= settings.min_hosts <= settings.hosts:
        raise UserError(
            f"min_hosts={settings.min_hosts} must be 1 to {settings.hosts}, --hosts (--min_hosts)"
        )
    timeline.parse_grid(settings.grid, settings.hosts * settings.processes)
    if not (command or settings.agent or settings.evict or settings.report):
        raise UserError("no command: supervise.py [settings] -- uv run experiments/pretrain.py ...")
    return settings, tuple(command)


def drive(s: argparse.Namespace, command: tuple[str, ...]) -> int:
    """Runs the driver. Returns its exit code."""
    host, _, port = s.listen.rpartition(":")
    try:
        listener = socket.create_server((host, int(port)), backlog=1024)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot listen on {s.listen}: {error} (--listen)") from None
    out = Path(s.out or f"runs/supervised/{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    token = os.environ.get("MEGAJAX_TOKEN") or secrets.token_hex(16)
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def spawn(name: str) -> subprocess.Popen:
        words = [f"--agent={address}", f"--name={name}", f"--period_s={s.period_s}"]
        return subprocess.Popen(
            [sys.executable, __file__, *words],
            env=os.environ | {"MEGAJAX_TOKEN": token},
            start_new_session=True,  # Ctrl-C is for the driver
        )

    def show(text: str) -> None:
        print(text, end="", flush=True)

    least = s.hosts if s.min_hosts is None else s.min_hosts
    driver = Driver(
        Settings(
            command, s.hosts, s.processes, s.join_s, s.grace_s, s.period_s, s.grid,
            Limits(s.start_s, s.step_s, s.save_s, s.evaluate_s, s.silence_s, 2 * s.period_s),
            Policy(s.max_restarts, least, backoff=s.backoff_s, straggler=s.straggler),
        ),
        Journal(out, lambda text: print(text, file=sys.stderr, flush=True)),
        listener, token, show, spawn if s.agents == "here" else None, s.spares,
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: driver.signals.append(number))
    reach = out / "driver.json"
    reach.touch(mode=0o600)
    reach.write_text(json.dumps({"address": address, "token": token}))
    try:
        return driver.run()
    finally:
        reach.unlink()


def report(s: argparse.Namespace) -> int:
    """Prints where the time went and draws the newest heat map. Returns 0."""
    out, run_dir = Path(s.out or "."), Path(s.run_dir or ".")
    events, rows = list(read_jsonl(out / "events.jsonl")), read_jsonl(run_dir / "metrics.jsonl")
    if len(events) < 2:
        raise UserError(f"{out} has no supervised run (--out)")
    for name, value in ettr.measured(events, rows).items():
        print(f"{name:10} {value:.4g}")
    newest = max(out.glob("attempt*/spans.json"), key=os.path.getmtime, default=None)
    if newest is not None:
        saved = json.loads(newest.read_text())
        spans = {int(rank): [Span(*x) for x in own] for rank, own in saved["spans"].items()}
        shares = timeline.own_share(spans)
        grid = timeline.parse_grid(saved["grid"], len(shares))
        timeline.draw_heat(shares, grid, out / "heat.png")
        print(f"see {out / 'heat.png'}, and {newest.parent}/timeline.json in ui.perfetto.dev")
    return 0


def evict(s: argparse.Namespace) -> int:
    """Tells the driver whose folder is --out. Returns 0."""
    try:
        reach = json.loads((Path(s.out or ".") / "driver.json").read_text())
        line = dial(reach["address"])
    except OSError as error:
        raise UserError(f"no driver is running for {s.out}: {error} (--out)") from None
    line.send({"token": reach["token"], "evict": s.evict})
    line.close()
    return 0


def main(argv: Sequence[str]) -> int:
    """Is the driver, an agent, a report, or the hand that evicts. Returns the exit code."""
    try:
        settings, command = parse(argv)
        if settings.report:
            return report(settings)
        if settings.evict:
            return evict(settings)
        if settings.agent:
            token = os.environ.get("MEGAJAX_TOKEN", "")
            # Without SLURM's own variables: jax would read from them that there is one process a
            # GPU.
            env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
            end = time.monotonic() + settings.join_s
            while True:
                try:
                    agent = Agent(settings.name, settings.agent, token, env, settings.period_s)
                    return agent.serve()
                except OSError as error:
                    if time.monotonic() > end:
                        at = settings.agent
                        raise UserError(f"no driver at {at}: {error} (--agent)") from None
                time.sleep(1)  # both are started at one time, and the driver may be later
        return drive(settings, command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
