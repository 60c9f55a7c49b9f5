"""Lists the experiments with their papers, or runs the smallest form of each.

    uv run scripts/run_experiments.py                        # the list
    uv run scripts/run_experiments.py --run                  # all, one after the other
    uv run scripts/run_experiments.py --run --only=flux,plan
    uv run scripts/run_experiments.py --names                # names alone, one a line

--run writes everything into --out, and makes one page of it, OUT/index.html, that a browser shows
without any other file: the state, the last lines and the pictures of each experiment. One
experiment with flags of its own: `megajax experiments NAME --FLAG=VALUE`.
"""

import megajax.core.interrupted  # noqa: F401

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.reports.catalogue import ENTRIES, Outcome, page, tail
from experiments.reports.reporting import NOT_JUDGED
from megajax.core import config
from megajax.core.config import Checked, equal, option
from megajax.core.errors import UserError, did_you_mean
from megajax.monitor import results
from megajax.systems.elastic import agent

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Config(Checked):
    """What is listed or run."""

    run: bool = option(False, "run the smallest form of each experiment")
    only: str | None = option(
        None, "names of experiments, joined by commas; none: all", needs=equal("run", True)
    )
    names: bool = option(False, "print the names alone, one a line")
    out: str = option("runs/experiments", "folder of all results", needs=equal("run", True))
    cache_dir: str = option(
        "~/.cache/megajax", "folder for compiled programs", needs=equal("run", True)
    )


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def main() -> int:
    """Lists or runs. Returns 1 when an experiment failed, 130 when it was stopped."""
    cfg, _ = config.from_flags(PRESETS)
    if cfg.run:
        return run(cfg, chosen(cfg.only))
    if cfg.names:
        print("\n".join(ENTRIES))
        return 0
    rows = [{"name": n, "paper": e.paper, "about": e.about} for n, e in ENTRIES.items()]
    columns = {"experiment": "name", "paper": "paper", "what it shows": "about"}
    print(results.columns(rows, columns))
    return 0


def chosen(only: str | None) -> list[str]:
    """Returns the names that are asked for and those that they need. Raises: UserError."""
    names = list(ENTRIES) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in ENTRIES:
            near = did_you_mean(name, ENTRIES) or f" There are {', '.join(ENTRIES)}."
            raise UserError(f"only={only}: there is no experiment {name!r}.{near} (--only)")
    needed = {n for name in names for n in (name, *ENTRIES[name].needs)}
    return [name for name in ENTRIES if name in needed]


def run(cfg: Config, names: list[str]) -> int:
    """Runs experiments one after the other; writes the page after each."""
    out = results.writable_folder(cfg.out).absolute()
    cache = Path(cfg.cache_dir).expanduser().absolute()
    (out / "logs").mkdir(exist_ok=True)
    outcomes: list[Outcome] = []
    commit = results.commit() or "unknown"
    title = f"megajax: experiments, smallest presets, commit {commit}"
    for name in names:
        began, log = time.monotonic(), out / "logs" / f"{name}.log"
        print(f"{name}: {ENTRIES[name].about}", flush=True)
        state, folders = "ok", [out / name]
        with open(log, "wb") as file:
            for command in ENTRIES[name].commands:
                words = shlex.split(command)
                words = [word.format(out=out, cache=cache) for word in words]
                folders += [Path(w.partition("=")[2]) for w in words if w.startswith("--run_dir=")]
                file.write(f"$ {command.format(out=out, cache=cache)}\n".encode())
                file.flush()
                code = one([sys.executable, str(ROOT / words[0]), *words[1:]], file.fileno())
                if code:
                    state = "stopped" if code == 130 else f"failed with exit code {code}"
                    break
            if state == "ok" and not judges(log):
                file.write(f"{NOT_JUDGED.format('smallest')}\n".encode())
        seconds = time.monotonic() - began
        # A run that this experiment reads is another one's.
        others = {out / needed for needed in ENTRIES[name].needs}
        shown = tuple(folder for folder in dict.fromkeys(folders) if folder not in others)
        outcomes.append(Outcome(name, state, seconds, log, shown))
        (out / "index.html").write_text(page(outcomes, title))
        last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
        print(f"  {state}, {seconds:.0f} s | {last[:200]}", flush=True)
        if state not in ("ok", "stopped"):
            print("\n".join(f"    {line}" for line in tail(log)), flush=True)
        if state == "stopped":
            print("stopped; the same command begins again", file=sys.stderr)
            break
    print(f"see {out / 'index.html'}")
    states = [outcome.state for outcome in outcomes]
    return 130 if "stopped" in states else int(any(state != "ok" for state in states))


def judges(log: Path) -> bool:
    """Tells whether the last line of an experiment compares it with a paper, or says that none
    is."""
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
    return last.startswith("paper ") or last.endswith(NOT_JUDGED.format(""))


def one(command: list[str], output: int) -> int:
    """Runs a command to its end, which Ctrl-C asks it for. Returns its exit code."""
    process = agent.tied(command, os.environ, output)
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return 130


if __name__ == "__main__":
    sys.exit(config.run(main))
