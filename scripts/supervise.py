"""Supervises a training command: finds processes and hosts that fail, and continues without them.

    uv run scripts/supervise.py --hosts=1 --processes=2 --max_restarts=5 -- \\
        uv run experiments/pretrain.py --emulate=4 --checkpoint.every=50

This starts the driver and, on this machine, one agent for each of --hosts. Each agent starts
--processes of the command; together they form one job. After a fault the driver ends all processes,
the hosts check themselves, and the same command continues from its newest good checkpoint. The
folder --out gets events.jsonl, metrics.prom (for Prometheus), the blocklist, and for each attempt
the logs and, after a fault, the stacks of all ranks.

On a cluster, the cluster's own launcher starts the agents, never this script:

    supervise.py --agents=elsewhere --listen=0.0.0.0:8475 --hosts=4 -- COMMAND
    srun supervise.py --agent=FIRST_HOST:8475             (one agent a host, on spare hosts too)

SUPERVISE=1 scripts/launch_slurm.sh does so. Driver and agents prove to each other that they know
the job's secret without sending it. The secret is MEGAJAX_TOKEN in the environment of both, or the
first line of --token_file. The training processes do not get it. --tls encrypts the connections.

--report --out=OUT --run_dir=RUN prints how the time was spent (ETTR) and draws the ranks.
--evict=HOST --out=FOLDER takes a host out of a running job; --readmit=HOST lets it come back.

Exit codes: 0 the command completed; 2 the command cannot work; 70 one step failed with the same
error on several hosts (do not retry); 75 too few good hosts or restarts are left (retry on other
hosts than those of the blocklist), a disk is full or the last save failed (retry when the storage
works); 76 a newer driver continues the run (do not retry); 143 the job was told to stop and has
saved. The last line of a driver that gave up is the command that continues the run.
"""

import megajax.core.interrupted  # noqa: F401

import argparse
import dataclasses
import errno
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core import script
from megajax.core.config import Limits as Range
from megajax.core.config import check_number
from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import expand
from megajax.monitor import exporter, timeline
from megajax.monitor.detectors import DETECTORS, USUAL, Limits, Maker
from megajax.monitor.records import keep_standard_streams
from megajax.systems.elastic.agent import Agent
from megajax.systems.elastic.driver import WAITING_S, Driver, Settings
from megajax.systems.elastic.events import Journal, Speaker, hold, new_folder
from megajax.systems.elastic.policy import Policy
from megajax.systems.elastic.wire import (
    OPERATOR,
    Tls,
    announce,
    check_secret,
    dial,
    invitation,
    listen,
    own_address,
    self_signed,
    split_address,
)
from megajax.systems.minder import run

# What a number may be, by its flag.
RANGES = {
    **dict.fromkeys("hosts processes".split(), Range(at_least=1)),
    **dict.fromkeys(
        "spares max_restarts backoff_s join_s grace_s rejoin_s".split(), Range(at_least=0)
    ),
    **dict.fromkeys("start_s step_s save_s evaluate_s silence_s period_s".split(), Range(above=0)),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a sentence, where argparse would print its usage."""

    def error(self, message: str):
        """Raises: UserError."""
        raise UserError(f"{message}; --help lists the flags")


def flags_of() -> Parser:
    """Returns the flags of this script, by what they are about."""
    parser = Parser(
        usage="%(prog)s [flags] -- COMMAND",
        description=script.as_started(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("the job").add_argument
    add("--hosts", type=int, default=1, help="number of hosts that train at the same time")
    add("--processes", type=int, default=1, help="processes of the command on each host")
    add("--spares", type=int, default=0, help="hot spares: agents of this machine beyond --hosts")
    add("--min_hosts", type=int, help="fewest hosts to continue with; default: --hosts")
    add("--max_restarts", type=int, default=5, help="most restarts of the whole job")
    add("--backoff_s", type=float, default=1.0, help="pause before restarts; doubles without steps")
    _detectors(parser.add_argument_group("who watches, and what follows").add_argument)
    add = parser.add_argument_group("pictures").add_argument
    add("--grid", help="mesh of all devices, for pictures, e.g. pipe=2,data=4,tensor=8")
    add = parser.add_argument_group("how long is too long, in seconds").add_argument
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
    add("--period_s", type=float, default=1.0, help="time between two reports of an agent")
    _meeting(parser.add_argument_group("how driver and agents meet").add_argument)
    add = parser.add_argument_group("what is left behind").add_argument
    add("--out", help="folder of events, logs and evidence; default: runs/supervised/<time>")
    add("--report", action="store_true", help="print how the time of --out and --run_dir was spent")
    add("--run_dir", help="folder of the training run, for --report")
    return parser


def _detectors(add: Callable[..., Any]) -> None:
    add(
        "--straggler",
        choices=("warn", "evict"),
        default="warn",
        help="response to a rank that is slower than the others; evict: save, and continue "
        "without its host if enough others are left; [%(default)s]",
    )
    add(
        "--detectors",
        default=USUAL,
        help=f"detectors, joined by commas, of: {', '.join(DETECTORS)}; {USUAL}: all of these",
    )
    add(
        "--respond",
        default="",
        help="response to the alerts of a rule: rule=warn, rule=evict or "
        "rule=restart, joined by commas",
    )
    run.add_flags(add)


def _meeting(add: Callable[..., Any]) -> None:
    add("--listen", default="127.0.0.1:0", help="host:port at which the driver listens")
    add("--agents", choices=("here", "elsewhere"), default="here", help="who starts the agents")
    add("--agent", metavar="HOST:PORT", help="run as the agent of this host, for this driver")
    add(
        "--rejoin_s",
        type=float,
        default=30.0,
        help="time for an --agent to come back when its "
        "connection ended and the driver may not have; [%(default)g]",
    )
    add(
        "--metrics_at",
        metavar="HOST:PORT",
        help="address at which an --agent serves this host's counters to Prometheus; default: none",
    )
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())  # as a blocklist must have it
    add("--name", default=name, help="name of this host, as an agent; [%(default)s]")
    add("--token_file", help="file whose first line is the job's secret; or set MEGAJAX_TOKEN")
    add("--tls", action="store_true", help="encrypt the connections of driver and agents")
    add("--tls_cert", help="PEM file of the driver, with its key; default: made at the start")
    add(
        "--tls_ca",
        help="PEM file of the authority that signed the driver's certificate; default: "
        "only the secret proves who the driver is",
    )
    add("--evict", metavar="HOST", help="tell the driver of --out to continue without this host")
    add("--readmit", metavar="HOST", help="tell the driver of --out that this host may return")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Returns (settings, the command behind '--'). Raises: UserError."""
    words = list(argv)
    command: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    parser = flags_of()
    settings, unknown = parser.parse_known_args(words)
    for word in unknown:
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r}: the command stands behind --")
        flag, known = word.partition("=")[0], [f"--{name}" for name in vars(settings)]
        raise UserError(f"there is no flag {flag}.{did_you_mean(flag, [*known, '--help'])}")
    for name, range_ in RANGES.items():
        check_number(name, name, getattr(settings, name), range_, parser.get_default(name))
    for name in ("out", "run_dir", "tls_cert", "tls_ca"):  # a shell leaves --out=~/x as it is
        if (path := getattr(settings, name)) is not None:
            setattr(settings, name, str(expand(path, name)))
    check(settings)
    if not (command or settings.agent or settings.evict or settings.readmit or settings.report):
        raise UserError(
            "no command: it stands behind --, e.g. supervise -- megajax train --preset=gpt2"
        )
    return settings, tuple(command)


def check(settings: argparse.Namespace) -> None:
    """Raises: UserError when settings do not fit one another."""
    if settings.min_hosts is not None and not 1 <= settings.min_hosts <= settings.hosts:
        raise UserError(
            f"min_hosts={settings.min_hosts} must be 1 to {settings.hosts}, --hosts (--min_hosts)"
        )
    timeline.parse_grid(settings.grid, settings.hosts * settings.processes)
    if settings.silence_s < 2 * settings.period_s:
        raise UserError(
            f"silence_s={settings.silence_s:g} must be at least {2 * settings.period_s:g}, twice "
            "--period_s, or every agent counts as silent (--silence_s)"
        )
    host = settings.name
    if not (host.isascii() and host.isprintable() and 0 < len(host) < 256):
        raise UserError(f"name={host!r} must be 1 to 255 printable ASCII characters (--name)")
    if settings.agent:
        split_address(settings.agent, "--agent")
    elif settings.metrics_at:
        raise UserError("--metrics_at is for an --agent; or run scripts/agent_metrics.py")


def find_secret(s: argparse.Namespace) -> str:
    """Returns the job's secret, '' when none is given; takes it out of the environment, so that
    nothing that is started here inherits it. Raises: UserError."""
    secret = os.environ.pop("MEGAJAX_TOKEN", "")
    if s.token_file is not None:
        try:
            lines = expand(s.token_file, "token_file").read_text("utf-8").splitlines()
        except OSError as error:
            raise UserError(
                f"cannot read {s.token_file}: {error.strerror} (--token_file)"
            ) from None
        except UnicodeDecodeError:
            raise UserError(f"{s.token_file} is not text (--token_file)") from None
        secret = lines[0].strip() if lines else ""
        return check_secret(secret, "--token_file")
    return check_secret(secret, "MEGAJAX_TOKEN") if secret else ""


def find_tls(s: argparse.Namespace, out: Path | None) -> Tls | None:
    """Returns the files of TLS, None without. out: of the driver, for a certificate of its own."""
    if not (s.tls or s.tls_cert or s.tls_ca):
        return None
    if out is None or s.tls_cert:
        return Tls(s.tls_cert, s.tls_cert, s.tls_ca)
    return dataclasses.replace(self_signed(out), authority=s.tls_ca)


def spawner(
    s: argparse.Namespace, address: str, secret: str, tls: Tls | None
) -> Callable[[str], subprocess.Popen]:
    """Returns what starts an agent on this machine for the driver at `address`, by its name."""

    def spawn(name: str) -> subprocess.Popen:
        words = [f"--agent={address}", f"--name={name}", f"--period_s={s.period_s}"]
        words += ["--rejoin_s=0"]  # the driver starts another
        words += ["--tls"] * bool(tls) + [f"--tls_ca={s.tls_ca}"] * bool(s.tls_ca)
        return subprocess.Popen(
            [sys.executable, __file__, *words],
            env=os.environ | {"MEGAJAX_TOKEN": secret},
            start_new_session=True,  # Ctrl-C is for the driver
        )

    return spawn


def drive(
    s: argparse.Namespace, command: tuple[str, ...], known: Mapping[str, Maker] = DETECTORS
) -> int:
    """Runs the driver. known: the detectors that --detectors may name. Returns its exit code."""
    detectors, responses = run.choose_detectors(vars(s), known)
    listener = listen(s.listen)
    secret = find_secret(s) or secrets.token_hex(16)
    out = new_folder() if s.out is None else Path(s.out).absolute()
    try:
        lock = hold(out)
    except UserError:
        listener.close()
        raise
    tls = find_tls(s, out)
    address = own_address(listener)
    host, port = split_address(s.listen, "--listen")[0], listener.getsockname()[1]
    speaker = Speaker()

    try:
        journal = Journal(out, lambda text: speaker.say(sys.stderr, text + "\n"))
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror} (--out)") from None
    least = s.hosts if s.min_hosts is None else s.min_hosts
    minder = run.of_driver(vars(s), detectors, journal)
    driver = Driver(
        Settings(
            command, s.hosts, s.processes, s.join_s, s.grace_s, s.period_s, s.grid,
            Limits(s.start_s, s.step_s, s.save_s, s.evaluate_s, s.silence_s, 2 * s.period_s),
            Policy(s.max_restarts, least, backoff=s.backoff_s, responses=responses),
            invitation(host, port, out) if s.agents == "elsewhere" else "", detectors,
            minder, s.again,
        ),
        journal, listener, secret, lambda text: speaker.say(sys.stdout, text),
        spawner(s, address, secret, tls) if s.agents == "here" else None, s.spares, tls,
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays what it is
            signal.signal(number, lambda number, _: driver.signals.append(number))
    announce(out / "driver.json", address, secret)
    try:
        return driver.run()
    finally:
        (out / "driver.json").unlink(missing_ok=True)
        if minder is not None:
            minder.close()
        speaker.close()
        keep_standard_streams()  # what they could not print is no error at the end
        os.close(lock)


def report(s: argparse.Namespace) -> int:
    """Prints where the time went and draws the newest heat map. Returns 0."""
    out, run_dir = Path(s.out or "."), Path(s.run_dir or ".")
    for name, value in timeline.figures(out, run_dir).items():
        print(f"{name:10} {value:.4g}")
    if (picture := timeline.shares(out)) is not None:
        newest, shares, grid = picture
        timeline.draw_heat(shares, grid, out / "heat.png")
        print(f"see {out / 'heat.png'}, and {newest.parent}/timeline.json in ui.perfetto.dev")
    return 0


def operate(s: argparse.Namespace) -> int:
    """Tells the driver whose folder is --out what to do about a host. Returns 0."""
    try:
        reach = json.loads((Path(s.out or ".") / "driver.json").read_text())
        line = dial(reach["address"], reach["token"], OPERATOR, "operator", find_tls(s, None))
        line.send({"evict": s.evict} if s.evict else {"readmit": s.readmit})
        line.close()
    except OSError as error:
        raise UserError(f"no driver is running for {s.out or '.'}: {error} (--out)") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{s.out or '.'}/driver.json was not written by a driver (--out)") from None
    return 0


def serve(s: argparse.Namespace) -> int:
    """Is the agent of this host, as soon as the driver is there. Returns its exit code."""
    secret = find_secret(s)
    if not secret:
        raise UserError("an agent must hold the job's secret (MEGAJAX_TOKEN, or --token_file)")
    # Without SLURM's own variables: jax would read from them that there is one process a GPU.
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    end, word, served = time.monotonic() + s.join_s, 0.0, False
    if s.metrics_at:
        shown = exporter.Server(*split_address(s.metrics_at, "--metrics_at"), exporter.Host().rows)
        threading.Thread(target=shown.serve_forever, daemon=True).start()
    while True:
        try:
            agent = Agent(s.name, s.agent, secret, env, s.period_s, find_tls(s, None))
        except OSError as error:
            left = end - time.monotonic()
            if served and (left < 0 or error.errno == errno.ECONNREFUSED):
                return 1  # the driver has ended
            if left < 0:
                raise UserError(f"no driver at {s.agent}: {error} (--agent)") from None
            if time.monotonic() > word:
                word = time.monotonic() + WAITING_S
                print(
                    f"[agent {s.name}] no driver at {s.agent} yet ({error}); waiting for "
                    f"{left:.0f} s more (--join_s)",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(min(1.0, left))  # both are started at one time; the driver may be later
        else:
            code = agent.serve()
            if code == 0 or agent.was_asked or not s.rejoin_s:
                return code
            served, end = True, time.monotonic() + s.rejoin_s


def main(argv: Sequence[str], detectors: Mapping[str, Maker] = DETECTORS) -> int:
    """Is the driver, an agent, a report, or an operator's word. Returns the exit code.

    detectors: that --detectors may name, of the caller's own too.
    """
    try:
        settings, command = parse(argv)
        settings.again = f"{script.command_words()} {shlex.join(argv)}"
        if settings.report:
            return report(settings)
        if settings.evict or settings.readmit:
            return operate(settings)
        if settings.agent:
            return serve(settings)
        return drive(settings, command, detectors)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
