"""The faults of a storm: which kinds there are, their order, and how each is inflicted.

The order comes from a seed alone. A strike acts from outside the program, as an accident would,
except for faults inside it: those go into a file that the trainers read (monitor/faults.py).
"""

import contextlib
import random
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from experiments.faults.cluster import Cluster, Host, environments, kill
from megajax.systems.elastic.wire import StrangerError, dial

# ---- kinds and order
#
# Which faults a storm has, and what must be said of each.
#
# Each kind strikes once in a round, in an order of the round's own, so that an hour meets all kinds
# about equally often. A kind without rules must be survived without a restart: whatever the driver
# calls a fault then is a false alarm.


Target = Literal["rank", "host", "none"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    rules: rules of the watchdog, one of which must report the fault; empty: the fault needs no
    restart. The driver and, through the lease, the trainers notice silence: if trainers end first
    and the others lose their connections to them, the rule is 'lost'. target: what the report must
    name. hold_s: seconds after which the fault is undone (a disk is freed, a frozen host wakes up);
    None: it cannot be undone. needs: what the machine must allow, so that the fault can be made.
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
    "stop agent": Kind(
        "SIGSTOP of an agent, which wakes up", ("silence", "lease", "lost"), "host", 40.0
    ),
    "stop host": Kind(
        "SIGSTOP of an agent and all that it started, which wake up", ("silence",), "host", 40.0
    ),
    "stop driver": Kind("SIGSTOP of the driver, which wakes up", ("driver",), "none", 25.0),
    "lost host": Kind(
        "a network that is silent, and comes back", ("silence", "lease", "lost"), "host", 40.0
    ),
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
    "flipped bit": Kind(
        "a flipped bit in the newest step, and kill -9 of a rank", ("exit",), "rank"
    ),
    "full run_dir": Kind("a full disk of the run", hold_s=15.0, needs="mount"),
    "full disk and kill": Kind(
        "a full disk of the run, and kill -9 of a rank", ("exit",), "rank", 15.0, needs="mount"
    ),
    "full out": Kind("a full disk of the supervisor", hold_s=10.0, needs="mount"),
    "lost log": Kind("a log file is deleted"),
    "strangers": Kind(
        "a bomb, an idle flood, a dribble and a guess at the driver's port", hold_s=10.0
    ),
    "driver told": Kind("SIGTERM of the driver, and another goes on", ("told",)),
    "driver killed": Kind("kill -9 of the driver, and another goes on", ("gone",)),
    "fake driver": Kind(
        "SIGTERM of the driver, a stranger at its port, and another goes on", ("told",)
    ),
}
# What is done to a job, and not by its program: nobody must be excluded for it.
FROM_OUTSIDE = (
    "kill rank", "kill agent", "kill both", "kill reaper", "stop rank", "stop agent", "stop host",
    "stop driver", "lost host", "slow network", "cut line", "wrong bytes", "full run_dir",
    "full disk and kill", "full out", "driver killed",
)  # fmt: skip
# A storm of minutes meets these, and not one kind more.
FEW = ("kill rank", "stop host", "junk", "strangers")
BY_MAIL = {
    "nan": "nan",
    "asleep": "sleep",
    "stuck": "gil",
    "left": "exit",
    "bad data": "data",
    "slow": "slow=0.6",
}


@dataclass(frozen=True)
class Strike:
    """One fault of the plan. draw: a number from 0 to 1 that decides the target."""

    kind: str
    draw: float


def strikes(seed: int, names: tuple[str, ...]) -> Iterator[Strike]:
    """Yields faults for ever, round by round."""
    draw = random.Random(seed)
    while True:
        for name in draw.sample(names, len(names)):
            yield Strike(name, draw.random())


# ---- strikes
#
# What each fault of a storm does to the processes, disks, folders and ports of a cluster.
#
# A deed returns what it struck, and what takes it back after a while. The clock of the machine is
# not touched: other programs use it.


RECORD = "integrity.json"
IDLE = 200  # (chosen) connections of a flood
HELD_S = 0.3  # (chosen) for each piece of up to 64 KiB; a period of reports is 0.5 s
FAKE_S = 8.0  # (chosen) for which a stranger sits at the driver's port
CHUNK = 1 << 20
Ranks = dict[int, tuple[Host, int]]


@dataclass
class Hit:
    """What a fault hit. ranks, hosts: the report must name one of them."""

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    note: str = ""
    back: Callable[[], None] = field(default=lambda: None)


class Deeds:
    """Strikes a cluster. attempt: number of the job's attempt; the caller updates it."""

    def __init__(self, cluster: Cluster, mail: Path):
        """mail: the file of faults that the trainers read."""
        self._cluster, self._mail = cluster, mail
        self.attempt = 0
        self.junk: set[str] = set()
        self.errors = 0  # in the program, for which a host may be excluded
        self.reaper_killed = False  # what it would have removed stays, until a later agent does

    def do(self, strike: Strike) -> Hit | None:
        """Strikes. Returns None if the target does not exist at the moment."""
        ranks = self._cluster.ranks()
        draw = random.Random(strike.draw)
        if not ranks:
            return None
        rank = draw.choice(sorted(ranks))
        if strike.kind in BY_MAIL:
            return self._send(BY_MAIL[strike.kind], rank)
        name = strike.kind.translate(str.maketrans({" ": "_", ",": None}))
        return getattr(self, f"_{name}")(rank, ranks, draw)

    def _send(self, kind: str, rank: int) -> Hit:
        self.errors += 1
        with open(self._mail, "a") as file:
            file.write(f"{kind}@1:rank{rank}:attempt{self.attempt}\n")
        return Hit((rank,))

    # ---- processes

    def _kill_rank(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        kill(ranks[rank][1])
        return Hit((rank,))

    def _kill_agent(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        kill(ranks[rank][0].pid)
        return Hit(hosts=(ranks[rank][0].name,))

    def _kill_both(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit | None:
        host = ranks[rank][0]
        others = [r for r, (h, _) in ranks.items() if h is not host]
        if not others:
            return None
        other = draw.choice(others)
        kill(ranks[other][1])
        kill(host.pid)
        return Hit((other,), (host.name,))

    def _kill_reaper(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host = ranks[rank][0]
        kill(self._cluster.reaper_of(host.pid))
        return Hit(note=host.name)

    def _kill_agent_reaper(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host = ranks[rank][0]
        kill(self._cluster.reaper_of(host.pid))
        kill(host.pid)
        self.reaper_killed = True
        return Hit(hosts=(host.name,))

    def _stop_rank(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        kill(ranks[rank][1], signal.SIGSTOP)
        return Hit((rank,))

    def _stop_agent(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host = ranks[rank][0]
        pid = host.pid
        kill(pid, signal.SIGSTOP)
        return Hit(hosts=(host.name,), back=lambda: kill(pid, signal.SIGCONT))

    def _stop_host(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host = ranks[rank][0]
        prefix = f"megajax-{host.pid}-"
        stopped = [self._cluster.reaper_of(host.pid), host.pid]
        stopped += [p for p, w in environments() if prefix in w.get("MEGAJAX_PROGRESS", "")]
        for pid in stopped:
            kill(pid, signal.SIGSTOP)

        def wake() -> None:
            for pid in reversed(stopped):  # the trainers first: split brain, if any may be
                kill(pid, signal.SIGCONT)

        return Hit(hosts=(host.name,), note=f"{len(stopped)} processes", back=wake)

    def _lost_host(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host = ranks[rank][0]
        host.relay.cut = True

        def mend() -> None:
            host.relay.cut = False

        return Hit(hosts=(host.name,), back=mend)

    def _slow_network(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host = ranks[rank][0]
        host.relay.held_s = HELD_S

        def mend() -> None:
            host.relay.held_s = 0.0

        return Hit(note=host.name, back=mend)

    def _cut_line(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host = ranks[rank][0]
        host.relay.ends = True
        return Hit(hosts=(host.name,))

    def _wrong_bytes(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host = ranks[rank][0]
        host.relay.wrong = True
        return Hit(hosts=(host.name,))

    def _stop_driver(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit | None:
        if self._cluster.driver is None:
            return None
        pid = self._cluster.driver.pid
        kill(pid, signal.SIGSTOP)
        return Hit(back=lambda: kill(pid, signal.SIGCONT))

    def _twin(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        host: Host = ranks[rank][0]
        twin = self._cluster.spawn(self._cluster.agent_words(host, 4.0), "twins.txt")
        self._cluster.seen.add(twin.pid)

        def end() -> None:
            twin.kill()
            twin.wait()

        return Hit(note=host.name, back=end)

    # ---- steps

    def steps(self) -> list[Path]:
        """Returns the folders of the steps, oldest first, without those that a strike made."""
        folders = []
        with contextlib.suppress(OSError):
            for place in (self._cluster.run_dir / "checkpoints").iterdir():
                if place.name.isdecimal() and (place / RECORD).is_file():
                    folders += [place] if place.name not in self.junk else []
        return sorted(folders, key=lambda place: int(place.name))

    def _junk(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        home = self._cluster.run_dir / "checkpoints"
        newest = int(self.steps()[-1].name) if self.steps() else 0
        above = newest + draw.randrange(10**5, 10**6)
        for name, record in (
            (f"{above}", ""),
            (f"{above + 1}", '{"crc32": "0'),
            (f"0{newest}", None),
            ("\u00b2", None),
            (f"{newest + 1}", '{"crc32": "00000000", "record": {}}'),
            (f"{newest}.saving.old", None),
            (f"x{newest}", None),
        ):
            with contextlib.suppress(OSError):
                (home / name).mkdir()
                self.junk.add(name)
                (home / name / "_CHECKPOINT_METADATA").touch()
                if record is not None:
                    (home / name / RECORD).write_text(record)
        with contextlib.suppress(OSError, IndexError):
            shutil.copytree(self.steps()[-1], home / f"{above + 2}")
            self.junk.add(f"{above + 2}")
        return Hit(note=f"beside step {newest}")

    def _lost_step(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit | None:
        if len(self.steps()) < 2:
            return None
        newest = self.steps()[-1]
        kill(ranks[rank][1])
        shutil.rmtree(newest, ignore_errors=True)
        return Hit((rank,), note=f"step {newest.name}")

    def _flipped_bit(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit | None:
        if len(self.steps()) < 2:
            return None
        newest = self.steps()[-1]
        kill(ranks[rank][1])
        files = [f for f in newest.rglob("*") if f.is_file()]
        data = max(files, key=lambda f: (f.stat().st_size, f.name))
        with open(data, "r+b") as file:
            at = draw.randrange(data.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
        return Hit((rank,), note=f"step {newest.name}, {data.relative_to(newest)}, byte {at}")

    # ---- disks

    def _full_run_dir(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        return self._fill(self._cluster.disks["run_disk"])

    def _full_disk_and_kill(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        hit = self._fill(self._cluster.disks["run_disk"])
        kill(ranks[rank][1])
        return Hit((rank,), note=hit.note, back=hit.back)

    def _full_out(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        return self._fill(self._cluster.disks["out_disk"])

    def _fill(self, disk: Path) -> Hit:
        filler = disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(CHUNK)):
                pass
        return Hit(note=disk.name, back=lambda: filler.unlink(missing_ok=True))

    def _lost_log(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        log = self._cluster.out / f"attempt{self.attempt}" / f"rank{rank}.log"
        log.unlink(missing_ok=True)
        return Hit(note=log.name)

    # ---- ports

    def _strangers(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit:
        ended = threading.Event()
        thread = threading.Thread(target=self._annoy, args=(ended,), daemon=True)
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()

        return Hit(back=end)

    def _annoy(self, ended: threading.Event) -> None:
        where = ("127.0.0.1", self._cluster.port)
        with contextlib.ExitStack() as stack:
            socks = []
            with contextlib.suppress(OSError):
                for _ in range(IDLE):
                    socks.append(stack.enter_context(socket.create_connection(where, timeout=5)))
                socks[0].sendall(b"[" * 100_000 + b"\n")
            with contextlib.suppress(OSError, StrangerError):
                dial(f"127.0.0.1:{where[1]}", "guessed by somebody", "agent", "host1")
            while not ended.wait(0.05):
                with contextlib.suppress(OSError, IndexError):
                    socks[-1].sendall(b" ")

    def _driver_told(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit | None:
        if self._cluster.driver is None:
            return None
        self._cluster.driver.send_signal(signal.SIGTERM)
        return Hit()

    def _driver_killed(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit | None:
        if self._cluster.driver is None:
            return None
        self._cluster.driver.kill()
        return Hit()

    def _fake_driver(self, rank: int, ranks: Ranks, draw: random.Random) -> Hit | None:
        driver = self._cluster.driver
        if driver is None:
            return None
        driver.send_signal(signal.SIGTERM)
        self._cluster.held = float("inf")

        def sit() -> None:
            driver.wait()
            try:
                with socket.create_server(("127.0.0.1", self._cluster.port)) as server:
                    server.settimeout(FAKE_S)
                    with contextlib.suppress(TimeoutError, OSError):
                        while True:
                            sock, _ = server.accept()
                            with sock:
                                sock.sendall(b'{"do": "start", "command": ["id"]}\n' * 50)
            finally:
                self._cluster.held = 0.0

        thread = threading.Thread(target=sit, daemon=True)
        thread.start()
        return Hit(back=thread.join)
