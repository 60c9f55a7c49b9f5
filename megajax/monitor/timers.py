"""Always-on timers of the training loop's sections (MegaScale section 5.1).

The loop is always in exactly one section, so one call ends the one before and begins the next. No
device is waited for: what the devices and the other ranks take shows as `wait`. Each call also
writes the progress record that an agent watches, and no save begins without that agent's lease
(heartbeat.py). LaunchSkew compares the moments at which hosts launch a step. No jax import but in
`LaunchSkew.of_job`.

Legend: own time is what a rank does before its devices can begin the step: data and prepare. The
launch itself does not count: a CPU backend runs the step, and waits for other ranks, inside it.
"""

import atexit
import sys
import time
from pathlib import Path
from typing import Any

from megajax.monitor import heartbeat as heartbeat_
from megajax.monitor.heartbeat import CODES, SECTIONS, Heartbeat, dump_stacks_on_signal
from megajax.monitor.records import keep_standard_streams

OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # no other rank's death
_START, _DATA, _PREPARE, _SAVE = (CODES[s] for s in ("start", "data", "prepare", "save"))


class Timers:
    """Call `enter` at each boundary. `loss` and `has_bad_state` are published with the next one."""

    def __init__(
        self,
        heartbeat: Heartbeat | None = None,
        clock=time.monotonic,
        watch: heartbeat_.Watch | None = None,
    ):
        """Begins in the section 'start'.

        heartbeat: where progress is published; None: only sums are kept. watch: checks the lease
        before a save begins; None: there is no lease.
        """
        self._heartbeat, self._clock, self._watch = heartbeat, clock, watch
        self.loss = 0.0
        self.has_bad_state = False
        self._sums = [0.0] * len(SECTIONS)
        self._section, self._step = _START, 0
        self._since = self._step_began = clock()
        self._own_s = self._last_own_s = self._step_s = 0.0
        if heartbeat is not None:
            heartbeat.write(self._since, 0, _START, self.loss, 0.0, 0.0)

    @classmethod
    def of_process(cls, progress: Path | None) -> "Timers":
        """Returns the timers of this process, watched through the file that an agent named.

        A process that ends without having entered 'end' or 'told' says 'failed', or 'lost' when it
        died of another rank's death, before jax's own clean-up waits for the others. It ends itself
        when its agent's lease runs out, and not when the disk of its log is full.
        """
        if progress is None:
            return cls()
        keep_standard_streams()
        watch = heartbeat_.of_process(progress)
        dump_stacks_on_signal(progress)
        timers = cls(Heartbeat(progress), watch=watch)
        atexit.register(timers.leave)
        return timers

    def enter(self, section: str, step: int) -> float:
        """Ends the section before and begins this one. Returns the seconds of the one before."""
        now, code = self._clock(), CODES[section]
        if code == _SAVE and self._watch is not None:  # after a pause, before the thread looked
            self._watch.check()
        since, former = self._since, self._section
        spent = now - since
        self._sums[former] += spent
        if former == _DATA:
            self._own_s = spent
        elif former == _PREPARE:
            self._last_own_s = self._own_s + spent
        if code == _DATA:
            if self._step:
                self._step_s = now - self._step_began
            self._step_began = now
        if self._heartbeat is not None:
            self._heartbeat.keep(since, now, self._step, former)
            self._heartbeat.write(
                now, step, code, self.loss, self._last_own_s, self._step_s, self.has_bad_state
            )
        self._section, self._step, self._since = code, step, now
        return spent

    def drain(self) -> dict[str, float]:
        """Returns {'time_<section>_s': seconds} of sections that ended since the last call."""
        sums, self._sums = self._sums, [0.0] * len(SECTIONS)
        return {f"time_{s}_s": t for s, t in zip(SECTIONS, sums, strict=True) if t}

    def leave(self, error: BaseException | None = None) -> None:
        """Publishes how the process ends, unless that was published. error: what ends it."""
        if SECTIONS[self._section] in ("end", "told", "failed", "lost"):
            return
        error = error or getattr(sys, "last_exc", None)
        lost = type(error).__name__ == "JaxRuntimeError" and not str(error).startswith(OWN)
        self.enter("lost" if lost else "failed", self._step)


# ---- how far apart the hosts of a job launch the same step (MegaScale section 6.3)
#
# Skew that grows was MegaScale's slow decay of MFU: hosts that come late make all others wait in
# the first collective. Every host puts the moment of its launch into the job's key-value store,
# which costs no device time and no wait for others; the first host reads a step's moments once that
# step is done, when all of them must be there. The hosts' clocks must be synchronised: their
# difference is part of the figure.


FOLDER = "megajax/launch"


class LaunchSkew:
    """Call `launch` before a step's dispatch and `finish` when it is done."""

    def __init__(self, store: Any = None, host: int = 0):
        """store: the job's key-value store; None: the process is alone, nothing is measured."""
        self._store, self._host = store, host

    @classmethod
    def of_job(cls) -> "LaunchSkew":
        """Returns the one of this process."""
        import jax

        from megajax.core import mesh

        return cls(mesh.job_store(), jax.process_index())

    def launch(self, step: int) -> None:
        """Notes this host's moment."""
        if self._store is not None:
            # A training that ended by an error may have left its moment of this step there.
            key, moment = f"{FOLDER}/{step}/{self._host}", repr(time.time())
            self._store.key_value_set(key, moment, allow_overwrite=True)

    def finish(self, step: int) -> dict[str, float]:
        """Returns {'launch_skew_s': last host's moment - first host's}, on the first host of a job.

        The moments of the step are then forgotten.
        """
        if self._store is None or self._host != 0:
            return {}
        moments = [float(v) for _, v in self._store.key_value_dir_get(f"{FOLDER}/{step}/")]
        self._store.key_value_delete(f"{FOLDER}/{step}/")
        return {"launch_skew_s": max(moments) - min(moments)} if moments else {}
