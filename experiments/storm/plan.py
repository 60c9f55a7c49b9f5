"""Which faults a storm has, what must be said of each, and their order: from a seed alone. No jax.

Each kind strikes once in a round, in an order of the round's own, so that an hour meets all kinds
about equally often. A kind without rules must be survived without a restart: whatever the driver
calls a fault then is a false alarm.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Target = Literal["rank", "host", "none"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. rules: of the watchdog, of which one must find it; none: no restart.

    silence is seen by the driver and, through the lease, by the trainers: where those end first
    and the others lose them, the rule is lost.
    target: what must be named. hold_s: seconds after which it is taken back (a disk is freed, a
    frozen host wakes up), None: it cannot be. needs: what a machine must allow for it.
    """

    what: str
    rules: tuple[str, ...] = ()
    target: Target = "none"
    hold_s: float | None = None
    needs: str = ""


KINDS: dict[str, Kind] = {
    "kill rank": Kind("kill -9 of a rank", ("exit",), "rank"),
    "kill agent": Kind("kill -9 of an agent", ("agent",), "host"),
    "kill both": Kind("kill -9 of an agent and of a rank elsewhere", ("agent", "exit"), "host"),
    "kill reaper": Kind("kill -9 of a reaper"),
    "kill agent, reaper": Kind("kill -9 of an agent and its reaper", ("agent",), "host"),
    "stop rank": Kind("SIGSTOP of a rank", ("stopped", "stall"), "rank"),
    "stop agent": Kind("SIGSTOP of an agent, which wakes up",
                       ("silence", "lease", "lost"), "host", 40.0),
    "stop host": Kind("SIGSTOP of an agent and all that it started, which wake up",
                      ("silence",), "host", 40.0),
    "stop driver": Kind("SIGSTOP of the driver, which wakes up", ("driver",), "none", 25.0),
    "lost host": Kind("a network that is silent, and comes back", ("silence", "lease", "lost"),
                      "host", 40.0),
    "slow network": Kind("a network that holds every packet back for 0.3 s", hold_s=15.0),
    "cut line": Kind("a network that ends a connection", ("agent",), "host"),
    "wrong bytes": Kind("a network that changes a byte", ("agent",), "host", 10.0),
    "nan": Kind("NaN in a parameter of a rank", ("nan",), "rank"),
    "asleep": Kind("asleep before a collective", ("stall",), "rank"),
    "stuck": Kind("stuck in C code", ("stall",), "rank"),
    "left": Kind("exit(0) in the middle", ("exit",), "rank"),
    "bad data": Kind("an exception in the data loader", ("exit",), "rank"),
    "slow": Kind("a rank that is slow", ("straggler",), "rank"),
    "twin": Kind("an agent of a name that is there", hold_s=8.0),
    "junk": Kind("junk folders among the steps"),
    "lost step": Kind("rm of the newest step, and kill -9 of a rank", ("exit",), "rank"),
    "flipped bit": Kind("a flipped bit in the newest step, and kill -9 of a rank",
                        ("exit",), "rank"),
    "full run_dir": Kind("a full disk of the run", hold_s=15.0, needs="mount"),
    "full disk and kill": Kind("a full disk of the run, and kill -9 of a rank", ("exit",), "rank",
                               15.0, needs="mount"),
    "full out": Kind("a full disk of the supervisor", hold_s=10.0, needs="mount"),
    "lost log": Kind("a log file is deleted"),
    "strangers": Kind("a bomb, an idle flood, a dribble and a guess at the driver's port",
                      hold_s=10.0),
    "driver told": Kind("SIGTERM of the driver, and another goes on", ("told",)),
    "driver killed": Kind("kill -9 of the driver, and another goes on", ("gone",)),
    "fake driver": Kind("SIGTERM of the driver, a stranger at its port, and another goes on",
                        ("told",)),
}  # fmt: skip
# What is done to a job, and not by its program: nobody must be excluded for it.
FROM_OUTSIDE = (
    "kill rank", "kill agent", "kill both", "kill reaper", "stop rank", "stop agent", "stop host",
    "stop driver", "lost host", "slow network", "cut line", "wrong bytes", "full run_dir",
    "full disk and kill", "full out", "driver killed",
)  # fmt: skip
# A storm of minutes meets these, and not one kind more.
FEW = ("kill rank", "stop host", "junk", "strangers")
BY_MAIL = {"nan": "nan", "asleep": "sleep", "stuck": "gil", "left": "exit", "bad data": "data",
           "slow": "slow=0.6"}  # fmt: skip


@dataclass(frozen=True)
class Strike:
    """One fault of the plan. draw: from 0 to 1, of which its target follows."""

    kind: str
    draw: float


def strikes(seed: int, names: tuple[str, ...]) -> Iterator[Strike]:
    """Yields faults for ever, round by round."""
    draw = random.Random(seed)
    while True:
        for name in draw.sample(names, len(names)):
            yield Strike(name, draw.random())
