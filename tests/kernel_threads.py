"""Kernels' own code as threads on a CPU: every warpgroup of every block of every rank is one.

Exactly one thread runs at a time. At each operation that another thread can see, a seeded random
scheduler decides who goes on: another thread, or a copy or product that somebody started and nobody
has waited for. Threads and copies have weights, so that some are much slower than others in a run.
What is checked is that every access of memory is ordered with those that it conflicts with
(kernel_memory.py), that the phases of barriers are seen one by one, that nothing happens to a block
or a rank that has ended, and that somebody can always go on.

A thread has four components of the vector clocks: what it does itself, its stores by TMA, their
reads of shared memory, and its products. The loads of a barrier are one more, counted in phases.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.kernel_memory import GENERIC, GLOBAL, SHARED, Fault, Memory, Ref

MOST = 1_000_000  # operations of a run: more are a loop without an end
OWN, STORED, READ, PRODUCTS = range(4)  # the components of a thread


class Stopped(BaseException):
    """Ends the threads of a run that has failed."""


class Action:
    """What happens at some later time: a copy, or a product. weight: how soon."""

    def __init__(self, do: Callable[[], None], weight: float):
        """Is started."""
        self.do, self.weight = do, weight


class Thread:
    """A warpgroup. axes: its place, by the names of the axes. block: its shared memory.

    first: of its components of the clocks. weight: how often it runs.
    """

    def __init__(self, axes: dict[str, int], block: "Block", first: int, weight: float):
        """Has not begun."""
        self.axes, self.block, self.first, self.weight = axes, block, first, weight
        self.rank = block.rank
        self.baton = threading.Lock()
        self.baton.acquire()
        self.done = False
        self.waits_for = ""
        self.seen: dict[Barrier, int] = {}  # phases of barriers
        self.flags = 0  # arrays of flags that it asked for
        # Of stores by TMA, and products: groups that are started; parts of each that are not over.
        self.started = {STORED: 0, PRODUCTS: 0}
        self.left: dict[tuple[int, int], int] = {}
        self.clock = np.zeros((3, 0), np.int32)
        self.late: Callable[[], None] | None = None  # a wait that a mutant puts off

    def __str__(self):
        return f"rank {self.rank} {self.axes}"

    def event(self, part: int = OWN) -> tuple[int, int]:
        """The next one of a component."""
        count = self.clock[GENERIC, self.first] if part == OWN else self.group(part)
        return self.first + part, int(count)

    def group(self, part: int) -> int:
        """The number of the group that a store belongs to, or a product that is started."""
        return self.started[PRODUCTS if part == PRODUCTS else STORED] + (part != PRODUCTS)

    def released(self) -> np.ndarray:
        """What it knows now, for others; what it does from now on they do not know."""
        clock = self.clock.copy()
        self.clock[GENERIC, self.first] += 1
        return clock


class Block:
    """A thread block: its shared memory, barriers and threads; others of its cluster.

    number: in the cluster.
    """

    def __init__(self, memory: Memory, rank: int, number: int):
        """Runs."""
        self.memory, self.rank, self.number = memory, rank, number
        self.barriers: list[Barrier] = []
        self.threads: list[Thread] = []
        self.cluster: list[Block] = []
        self.ended = False


class Barrier:
    """An mbarrier in a block's shared memory.

    need: arrivals of a phase. shared: by all blocks of the cluster. named: those of the same name.
    number: among the block's. component: of the clocks, of the loads that report to it.
    """

    def __init__(
        self, machine: "Machine", block: Block, need: int, shared: bool, named: "list[Barrier]"
    ):
        """Is in its first phase."""
        self.machine, self.block, self.need, self.shared = machine, block, need, shared
        self.named = named
        self.component = machine.component(1)
        self.number = len(block.barriers)
        block.barriers.append(self)
        self.arrived, self.bytes, self.phase = 0, 0, 0
        self.collected: np.ndarray | None = None  # clocks of the arrivals
        self.observed: dict[Thread, int] = {}  # the event of a thread's last wait

    def on(self, block: Block) -> "Barrier":
        """The same one of another block of the cluster."""
        return block.barriers[self.number]

    def arrive(self, clock: np.ndarray, by: Thread, tx: int = 0):
        """Counts an arrival, and bytes that are to come."""
        if self.block.ended:
            raise Fault(f"{by} arrives at a barrier of a block that has ended")
        if self.arrived == self.need:
            raise Fault(f"{by} arrives at a barrier whose phase is full")
        self.arrived, self.bytes = self.arrived + 1, self.bytes + tx
        self._join(clock)
        self._advance()

    def came(self, size: int):
        """Counts bytes that a copy has brought."""
        if self.block.ended:
            raise Fault("a copy arrives at a block that has ended")
        self.bytes -= size
        self._advance()

    def _join(self, clock: np.ndarray):
        self.collected = (
            clock.copy() if self.collected is None else np.maximum(self.collected, clock)
        )

    def _advance(self):
        if self.arrived < self.need or self.bytes:
            return
        self.phase, self.arrived = self.phase + 1, 0
        assert self.collected is not None
        self.collected[:, self.component] = self.phase
        for thread, count in self.observed.items():
            # The parity of phases is all that a waiting thread sees.
            if thread.seen[self] == self.phase - 1 and self.collected[0, thread.first] < count:
                raise Fault(f"a barrier may begin another phase before {thread} has seen this one")
        self.machine.wake(self)

    def wait(self, thread: Thread):
        """Until the thread's next phase is over."""
        seen = thread.seen.get(self, 0)
        self.machine.until(
            lambda: self.phase > seen, self, f"phase {seen} of barrier {self.number}"
        )
        if self.phase > seen + 1:
            raise Fault(f"{thread} has missed a phase of barrier {self.number}")
        np.maximum(thread.clock, self.collected, out=thread.clock)
        thread.seen[self] = seen + 1
        self.observed[thread] = thread.event()[1]
        thread.released()

    def end(self, knows: np.ndarray):
        """Its block ends."""
        if self.arrived or self.bytes:
            raise Fault(f"barrier {self.number} is in the middle of a phase when its block ends")
        if self.collected is not None and (knows[GENERIC] < self.collected[GENERIC]).any():
            raise Fault(f"barrier {self.number} has a phase that its block has not seen")


class Flags:
    """Semaphores of a rank, or of all virtual ranks: they count up from 0."""

    def __init__(self, machine: "Machine", count: int, owner: int, number: int):
        """Are 0."""
        self.machine, self.owner, self.number = machine, owner, number
        self.shape = (count,)
        self.values = [0] * count
        self.clocks: list[np.ndarray | None] = [None] * count
        self.ended = False

    @property
    def at(self) -> "Flags":
        """flags.at[i]"""
        return self

    def __getitem__(self, index: Any) -> tuple["Flags", int]:
        if not 0 <= index < self.shape[0]:
            raise Fault(f"flag {index} of {self.shape[0]}")
        return self, int(index)

    def signal(self, index: int, thread: Thread):
        """Adds 1, and tells what the thread knows."""
        if self.ended:
            raise Fault(f"{thread} raises flag {index} of rank {self.owner} after that has ended")
        clock = thread.released()[GENERIC]
        before = self.clocks[index]
        self.clocks[index] = clock if before is None else np.maximum(before, clock)
        self.values[index] += 1
        self.machine.wake(self)

    def wait(self, index: int, value: int, thread: Thread):
        """Until a flag is at least `value`. What was signalled TMA does not know yet."""
        self.machine.until(
            lambda: self.values[index] >= value, self, f"flag {index}: {value} signals"
        )
        clock = self.clocks[index]
        if clock is not None:
            np.maximum(thread.clock[GENERIC], clock, out=thread.clock[GENERIC])

    def end(self, knows: np.ndarray):
        """Its rank ends: nobody may raise one after that."""
        self.ended = True
        for index, clock in enumerate(self.clocks):
            if clock is not None and (knows[GENERIC] < clock).any():
                raise Fault(f"flag {index} of rank {self.owner} may be raised after its end")


class Machine:
    """Runs threads, one at a time."""

    def __init__(self, seed: int):
        """Has no threads yet."""
        self.random = random.Random(seed)
        # How often threads take turns though nobody must wait; how soon copies happen.
        self.restless = self.random.choice((0.02, 0.1, 0.5))
        self.haste = self.random.choice((0.1, 1, 100))
        self.threads: list[Thread] = []
        self.blocks: list[Block] = []
        self.ranks: dict[int, list[Any]] = {}  # arrays, then flags, of each
        self.runnable: list[Thread] = []
        self.actions: list[Action] = []
        self.asleep: dict[Any, list[Thread]] = {}
        self.components, self.operations, self.switches = 0, 0, 0
        self.running: Thread | None = None
        self.failed: BaseException | None = None
        self.over = threading.Lock()
        self.over.acquire()

    def component(self, count: int) -> int:
        """Returns the first of `count` new components of the clocks."""
        self.components += count
        return self.components - count

    def weight(self, spread: float) -> float:
        """How often something is chosen: log-normal."""
        return self.random.lognormvariate(0, spread)

    @property
    def me(self) -> Thread:
        """The thread that runs."""
        assert self.running is not None
        return self.running

    # ---- who runs

    def run(self, bodies: Sequence[tuple[Thread, Callable[[], None]]]):
        """Runs all threads to their ends. Raises: what the first one that fails has raised."""
        for thread, _ in bodies:
            thread.clock = np.zeros((3, self.components), np.int32)
            thread.clock[GENERIC, thread.first] = 1
            self.threads.append(thread)
            self.runnable.append(thread)
        workers = [
            threading.Thread(target=self._run, args=body, daemon=True, name=str(body[0]))
            for body in bodies
        ]
        for worker in workers:
            worker.start()
        self._next()
        self.over.acquire()
        for thread in self.threads:
            if not thread.done:
                thread.baton.release()
        for worker in workers:
            worker.join()
        if self.failed is not None:
            raise self.failed

    def _run(self, thread: Thread, body: Callable[[], None]):
        try:
            thread.baton.acquire()
            self._check()
            body()
            self._end(thread)
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            thread.done = True

    def _fail(self, error: BaseException):
        if self.failed is None:
            if self.running is not None:
                error.add_note(f"in {self.running}")
            self.failed = error
            self.over.release()

    def _check(self):
        if self.failed is not None:
            raise Stopped

    def switch(self, signal: bool = False):
        """An operation that others can see comes: somebody else may go first."""
        if self.me.late is not None and not signal:
            wait, self.me.late = self.me.late, None
            wait()
        self.operations += 1
        if self.operations > MOST:
            raise Fault("it does not end")
        if self.random.random() < self.restless:
            self._next()

    def _next(self):
        """Lets actions happen and one thread run; returns when this one is to."""
        before = self.running
        while True:
            choices = [*self.runnable, *self.actions]
            if not choices:
                self._stuck()
                return
            (chosen,) = self.random.choices(choices, [c.weight for c in choices])
            if isinstance(chosen, Thread):
                break
            self.actions.remove(chosen)
            chosen.do()
        if chosen is before:
            return
        self.running = chosen
        self.switches += 1
        chosen.baton.release()
        if before is not None and not before.done:
            before.baton.acquire()
            self._check()

    def _stuck(self):
        left = [thread for thread in self.threads if not thread.done]
        if not left:
            self.over.release()
            return
        raise Fault("deadlock: " + "; ".join(f"{t} waits for {t.waits_for}" for t in left))

    def until(self, ready: Callable[[], bool], what: Any, why: str):
        """The thread that runs waits. what: calls `wake` when it changes."""
        thread = self.me
        while not ready():
            thread.waits_for = why
            self.runnable.remove(thread)
            self.asleep.setdefault(what, []).append(thread)
            self._next()

    def wake(self, what: Any):
        """Those that wait for it look again."""
        self.runnable.extend(self.asleep.pop(what, ()))

    def later(self, do: Callable[[], None]):
        """Lets something happen between now and when it is waited for."""
        self.actions.append(Action(do, self.haste * self.weight(2)))

    # ---- ends

    def _end(self, thread: Thread):
        self.wait_groups(READ, thread.started[STORED], known_only=True)
        thread.done = True
        self.runnable.remove(thread)
        block = thread.block
        if all(t.done for t in block.threads):
            block.ended = True
            knows = _joined(block.threads)
            for barrier in block.barriers:
                barrier.end(knows)
        same_rank = [t for t in self.threads if t.rank == thread.rank]
        if all(t.done for t in same_rank):
            knows = _joined(same_rank)
            for thing in self.ranks[thread.rank]:
                thing.end(knows)
        self._next()

    # ---- what threads do

    def load(self, ref: Ref) -> Any:
        """Returns what a part of an array holds."""
        thread = self._within(ref)
        ref.memory.read(ref.box, thread.event(), thread.clock, GENERIC, thread.rank, None)
        value = ref.read()
        return value[()] if value.ndim == 0 else value

    def store(self, ref: Ref, value: Any):
        """Sets a part of an array."""
        thread = self._within(ref)
        ref.memory.write(ref.box, thread.event(), thread.clock, GENERIC, thread.rank)
        ref.write(np.broadcast_to(value, ref.shape))

    def _within(self, ref: Ref) -> Thread:
        if not ref.within:
            raise Fault(f"{ref.memory.name}: {ref.box} is past its end")
        return self.me

    def wait_groups(self, part: int, last: int, known_only: bool = False):
        """Until all groups of stores, or products, up to `last` are over.

        part: STORED, READ or PRODUCTS. known_only: they must have been waited for.
        """
        thread = self.me
        if known_only:
            if thread.clock[GENERIC, thread.first + part] < last:
                raise Fault(f"{thread} ends while TMA may still read its shared memory")
            return
        parts = (READ, STORED) if part == STORED else (part,)

        def over():
            return not any(p in parts and group <= last for p, group in thread.left)

        self.until(over, thread, "copies")
        for p in parts:
            known = thread.clock[:, thread.first + p]
            np.maximum(known, last, out=known)

    def begin(self, part: int) -> tuple[Thread, tuple[int, int]]:
        """A part of a group begins; returns what `finish` wants."""
        thread = self.me
        key = part, thread.group(part)
        thread.left[key] = thread.left.get(key, 0) + 1
        return thread, key

    def finish(self, begun: tuple[Thread, tuple[int, int]]):
        """It is over."""
        thread, key = begun
        thread.left[key] -= 1
        if not thread.left[key]:
            del thread.left[key]
            self.wake(thread)


def _joined(threads: Sequence[Thread]) -> np.ndarray:
    return np.maximum.reduce([thread.clock for thread in threads])


assert SHARED < GLOBAL  # rows of a clock; see kernel_memory.py
