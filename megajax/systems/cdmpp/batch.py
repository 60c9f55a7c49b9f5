"""A batch of programs, from their numbers to a file of labels: compile, then time, then save."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.monitor import results
from megajax.systems.cdmpp.families import Program
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.prepare import prepared, runnable
from megajax.systems.cdmpp.profile import Ready, Timed, measure_ready
from megajax.systems.cdmpp.turns import Turns


@dataclasses.dataclass(frozen=True)
class Batch:
    """Programs to time, and how.

    name: the number of their file, that of programs up to the last of these. threads: programs that
    compile at a time. end: as `prepared` has it. turns, host: of a GPU, which other processes may
    use; host draws the arrays. facts: more of them for the labels.
    """

    numbers: Sequence[int]
    folder: Path
    card: DeviceCard
    passes: int
    name: int
    threads: int = 1
    end: float = float("inf")
    turns: Turns | None = None
    host: jax.Device | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def time(self, draw: Callable[[int], Program]) -> dict[str, Any]:
        """Times the programs and writes their file; returns what to print.

        Raises: UserError as `measure_ready` does, except on a GPU.
        """
        tell = functools.partial(print, flush=True)
        began = time.monotonic()
        found, tried = prepared(
            draw, self.numbers, threads=self.threads, end=self.end, host=self.host, tell=tell
        )
        compiled = time.monotonic()
        timed: list[Timed] = []
        with self.turns.turn() if self.turns else contextlib.nullcontext(0.0) as waited:
            try:
                found = runnable(found, tell, device=jax.devices()[0] if self.host else None)
                timed = measure_ready(found, self.passes)
            except Exception as error:  # out of memory, with other programs' arrays in it
                if isinstance(error, UserError) and self.turns is None:
                    raise
                what = f"{type(error).__name__}: {str(error)[:300]}"
                tell(f"the batch of programs {list(self.numbers)} failed: {what}")
        if lost := _untimed(found, timed):
            tell(f"without a time: {lost}")
        facts = results.facts(self.card.name, "measured")
        facts |= {"passes": self.passes, **self.facts}
        labels = Labels.of(timed, self.card, facts)
        if len(labels.halves):
            labels.save(self.folder / "new.npz")  # in two steps, and the process may be ended
            name = self.name - len(self.numbers) + tried
            (self.folder / "new.npz").replace(self.folder / f"{name:06}.npz")
        return {
            "tried": tried,
            "rows": len(labels.halves),
            "untimed": sum(one.untimed for one in timed),
            "noise": 100 * labels.noise["noise_median"] if len(labels.halves) else float("nan"),
            "compiling": compiled - began,
            "waiting": waited,
            "timing": time.monotonic() - compiled - waited,
        }


def _untimed(found: Sequence[tuple[Program, Ready]], timed: Sequence[Timed]) -> str:
    """Returns how many instructions of each kind the profiler did not time, with an example."""
    lost: dict[str, list[str]] = {}
    for (_, compiled), one in zip(found, timed, strict=False):
        names = {record.name for record in one.records}
        for record in compiled.records:
            if record.name not in names:
                lost.setdefault(record.kind, []).append(record.name)
    return ", ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in lost.items())
