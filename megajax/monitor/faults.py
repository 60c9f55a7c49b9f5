"""Faults on purpose, by a flag of the training command: what a watchdog must survive.

--fault=kill@120:rank1 strikes rank 1 in step 120, in the first attempt only; several are joined by
commas. ':attempt2' strikes after the second restart, ':always' in every attempt, as a bad batch
would. Kinds:

kill    SIGKILL to itself               exit    exit(0) in the middle, as a library may
stop    SIGSTOP: a frozen process       nan     a parameter of this rank becomes NaN
sleep   asleep before the collective    data    an exception in the data loader
gil     C code that keeps the GIL       flood   a thread that prints for ever
slow    slow=0.12@120:rank1: from then on, own work of 12 % of a step more
save, evaluate    save=30@120:rank1: 30 s more in that save: a slow disk; in that evaluation
pace    pace=0.3@1:rank1: from then on 0.3 s more in every step

and of reinforcement learning:

unsynced    generation keeps the weights of the step before
generate, update_actor, update_critic    generate=30@3: 30 s more amid the rollouts of that
    iteration; amid its updates of a model

A word @FILE instead of a fault names a file to which faults are added while the run goes on, one a
line: each strikes in the next step of its rank, whatever step it names.

What strikes is recorded too, as `injected_fault`: a detector's findings can be compared with it.
A spec is checked without jax; no jax import here but in what makes a NaN.
"""

import dataclasses
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.core.errors import UserError, did_you_mean

LATE = {
    "slow": 0.12,
    "save": 30.0,
    "evaluate": 30.0,
    "pace": 0.3,
    "generate": 30.0,
    "update_actor": 30.0,
    "update_critic": 30.0,
}  # kinds with an amount, and what it usually is
LASTING = ("slow", "pace")  # from their step on
KINDS = ("kill", "stop", "sleep", "gil", "exit", "nan", "data", "flood", "unsynced", *LATE)
_SPEC = re.compile(
    r"(\w+)(?:=(\d+(?:\.\d*)?|\.\d+))?@(\d+)(?::rank(\d+))?(?::attempt(\d+)|(:always))?"
)


class InjectedError(RuntimeError):
    """The data loader's exception, made on purpose."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: kind, the step that it strikes in, the rank, the attempt (None: every one).

    Of the kind 'file' it stands for those that are found in the file `path`.
    """

    kind: str
    step: int
    rank: int = 0
    attempt: int | None = 0
    amount: float = 0.0
    path: str = ""


def parse(spec: str | None) -> tuple[Fault, ...]:
    """Returns the faults of a flag. Raises: UserError naming the word that is none."""
    faults = []
    for word in spec.split(",") if spec else ():
        if word.strip().startswith("@"):
            faults.append(Fault("file", 0, path=word.strip()[1:]))
            continue
        m = _SPEC.fullmatch(word.strip())
        if m is None:
            raise UserError(
                f"fault={word} must be kind@step[:rankN][:attemptN], e.g. kill@120:rank1 (--fault)"
            )
        if m[1] not in KINDS:
            raise UserError(
                f"fault={word}: {m[1]} must be one of {', '.join(KINDS)}."
                f"{did_you_mean(m[1], KINDS)} (--fault)"
            )
        amount = float(m[2]) if m[2] else LATE.get(m[1], 0.0)
        attempt = None if m[6] else int(m[5] or 0)
        faults.append(Fault(m[1], int(m[3]), int(m[4] or 0), attempt, amount))
    return tuple(faults)


class Injector:
    """The faults of this process. The loop calls `strike` in every step, with its data."""

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        rank: int = 0,
        attempt: int = 0,
        emit: Callable[[int, Mapping[str, str]], object] | None = None,
    ):
        """attempt: number of earlier starts of the job. emit: records values of a step."""
        self._rank, self._attempt, self._emit = rank, attempt, emit
        self._files = {f.path: -1 for f in faults if f.path}  # bytes that were read of each
        self._taken: set[str] = set()
        self._faults = self._of_this_rank(faults)
        self._began = time.monotonic()
        self._slept = 0.0

    def _of_this_rank(self, faults: Sequence[Fault]) -> list[Fault]:
        attempts = (None, self._attempt)
        return [f for f in faults if f.rank == self._rank and f.attempt in attempts and not f.path]

    def _look(self, step: int) -> None:
        """Reads faults that were added to the files; they strike in this step."""
        for path, size in self._files.items():
            try:
                if os.stat(path).st_size == size:
                    continue
                with open(path) as file:
                    text = file.read()
            except OSError:
                continue
            self._files[path] = len(text)
            for line in text.split("\n")[:-1]:  # half a line is none yet
                if line not in self._taken:
                    self._taken.add(line)
                    new = self._of_this_rank(parse(line))
                    self._faults += [dataclasses.replace(f, step=step) for f in new]

    def strike(self, step: int, state: Any) -> Any:
        """Makes the faults of this step.

        Returns the state, poisoned if that is one of the faults.
        """
        if self._files:
            self._look(step)
        if not self._faults:
            return state
        now = time.monotonic()
        usual = now - self._began - self._slept
        self._began, self._slept = now, 0.0
        for fault in self._faults:
            if fault.kind in LASTING and step == fault.step:
                self._tell(fault.kind, step)
            if fault.kind == "slow" and step >= fault.step:
                self._slept = fault.amount * usual
                time.sleep(self._slept)
            elif fault.kind == "pace" and step >= fault.step:
                time.sleep(fault.amount)
            elif fault.step == step and fault.kind not in LATE:
                print(f"injected fault: {fault.kind} in step {step}", flush=True)
                self._tell(fault.kind, step)
                if fault.kind == "nan":
                    state = _poison(state)
                else:
                    DEEDS[fault.kind]()
        return state

    def expects(self, kind: str, step: int | None = None) -> bool:
        """Tells whether a fault of this kind strikes this process in a step; None: in any."""
        return any(f.kind == kind and step in (None, f.step) for f in self._faults)

    def _tell(self, kind: str, step: int) -> None:
        if self._emit is not None:
            self._emit(step, {"injected_fault": kind})

    def delay(self, section: str, step: int) -> None:
        """Sleeps where this section of this step is to take longer."""
        for fault in self._faults:
            if (fault.kind, fault.step) == (section, step):
                print(f"injected fault: {section} in step {step}", flush=True)
                self._tell(section, step)
                time.sleep(fault.amount)


def _hold_the_interpreter() -> None:
    sum(itertools.repeat(0))  # endless, inside C


def _raise() -> None:
    raise InjectedError("the data loader failed on purpose")


def _flood() -> None:
    line = "x" * 100 + "\n"

    def write() -> None:
        while True:
            sys.stdout.write(1000 * line)

    threading.Thread(target=write, daemon=True).start()


DEEDS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(10**6),
    "gil": _hold_the_interpreter,
    "exit": lambda: sys.exit(0),
    "data": _raise,
    "flood": _flood,
    "unsynced": lambda: None,  # systems/hybridflow/controller.py leaves the transition out
}


def _poison(state: Any) -> Any:
    """Returns the state with NaN in this process's shards of its first float leaf."""
    import jax
    import jax.numpy as jnp

    leaves, tree = jax.tree.flatten(state)
    at = next(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating))
    shards = [
        jax.device_put(jnp.full(s.data.shape, jnp.nan, s.data.dtype), s.device)
        for s in leaves[at].addressable_shards
    ]
    leaves[at] = jax.make_array_from_single_device_arrays(
        leaves[at].shape, leaves[at].sharding, shards
    )
    return jax.tree.unflatten(tree, leaves)
