"""The second stage of a save, in a thread of its own: from Orbax's files to a step that was read
back.

store: waits for Orbax, sums the files, writes the integrity record (integrity.py) and gives the
step its name, with which it counts. check: reads the step back from storage, compares it with the
fingerprints of the devices' arrays, says in a mark (marks.py) what was found, and lets older steps
go. A step that was not read back lets none go. Reading back runs beside the next save, but ends
before that save's step gets its name: so no two run at once, and no more than one step is waiting.
A step that a kill kept from being read back is read by the next save, before its own gets its name.

The processes of a job meet twice in `store`. In `check` they leave word with jax's coordination
service: what each found, and from process 0, what follows.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import jax
from absl import logging

from megajax.checkpoint import fingerprint, integrity, marks, read_back, storage
from megajax.checkpoint.directory import StepFolder
from megajax.checkpoint.fingerprint import Fingerprints
from megajax.checkpoint.integrity import CheckpointError, LeafSum, Record
from megajax.checkpoint.storage import Compression, ReadBackError, SaveHandle

Table = list[tuple[str, tuple[int, ...], str, list[int]]]  # name, shape, dtype, order of its rows
Verify = Literal["full", "fast"] | None  # what a restore checks
Found = dict[str, Any]  # what one process read back: {"wrong": [...]} or {"unknown": "why"}


@dataclass(frozen=True)
class Job:
    """What the second stage of one save is given.

    number: of the save, the same on all processes. response: Orbax's. former: the save before,
    which may still be reading back. unread: an older step to read back first.
    """

    step: int
    number: int
    response: Any
    table: Table
    prints: Fingerprints
    metric: float | None
    former: SaveHandle | None
    unread: int | None


def check_settings(keep: int, best: int, compression: str, verify: str | None) -> None:
    """Raises CheckpointError for a setting of a manager that cannot be."""
    for name, value, flag in (("keep", keep, " (--checkpoint.keep)"), ("best", best, "")):
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"{name}={value!r} must be a whole number from 0 on; nearest: 0{flag}"
            )
    for name, word, words in (
        ("compression", compression, get_args(Compression)),
        ("verify", verify, (None, "fast", "full")),
    ):
        if word not in words:
            raise CheckpointError(f"{name}={word!r} must be one of {', '.join(map(str, words))}")


class Sealer:
    """The second stage of all saves in one folder."""

    def __init__(self, steps: StepFolder, keep: int, best: int, reads_back: bool, bad: set[int]):
        """bad: the steps that are known to be damaged; those found to be are added."""
        self._steps, self._keep, self._best = steps, keep, best
        self._reads_back, self._bad = reads_back, bad
        self._part, self._parts = jax.process_index(), jax.process_count()
        self.refuted: list[int] = []  # steps that were read back and not what was written

    def store(self, job: Job) -> None:
        """Seals a step and gives it its name. Raises: what storage does."""
        saving, meet = self._steps.saving(job.step), storage.barrier()
        problem: Exception | None = None
        try:
            try:
                sums = job.prints.local()  # beside Orbax's writing, which must end in any case
            finally:
                storage.wait(job.response, f"megajax_failed_{job.number}", saving.parent)
            mine = integrity.list_files(saving)[self._part :: self._parts]
            secret = mine if self._steps.keys else ()
            summed = integrity.sum_files(saving, mine, None, secret)
            files = {n: asdict(f) for n, f in summed.items()}
            if job.former is not None:
                job.former.join()
            unread = None if job.unread is None else self._share(job.unread)
            part = {"files": files, "fingerprints": sums, "unread": unread}
            name = f"{integrity.PART}{self._part}"
            integrity.write_file(saving / name, json.dumps(part))
        except Exception as error:
            problem = error
            storage.give_up(f"megajax_failed_{job.number}", error)
        # A process that failed meets the others all the same, or they would wait in vain.
        meet(key=f"megajax_summed_{job.number}", timeout_ms=1000 * storage.PATIENCE_S)
        if self._part == 0:
            try:
                if problem is not None:
                    raise problem
                self._seal(job)
            except Exception as error:
                problem = error
                self._steps.drop_saving(job.step)
            finally:
                self._steps.unlock()
        meet(key=f"megajax_named_{job.number}", timeout_ms=1000 * storage.PATIENCE_S)
        if problem is None and not (self._steps.step(job.step) / integrity.RECORD).exists():
            problem = OSError("another process could not write")
        if problem is not None:
            raise problem
        self._bad.discard(job.step)

    def _seal(self, job: Job) -> None:
        """Writes the record, from what each process found, and the name."""
        saving = self._steps.saving(job.step)
        paths = sorted(saving.glob(f"{integrity.PART}*"))
        if len(paths) != self._parts:
            raise OSError(f"only {len(paths)} of {self._parts} processes wrote their part")
        parts = [json.loads(p.read_text()) for p in paths]
        files = {n: integrity.FileSum(**f) for part in parts for n, f in part["files"].items()}
        sums = [
            fingerprint.add(own) for own in zip(*(p["fingerprints"] for p in parts), strict=True)
        ]
        found = {
            name: LeafSum(list(shape), dtype, list(total), order)
            for (name, shape, dtype, order), total in zip(job.table, sums, strict=True)
        }
        if job.unread is not None:
            self._judge(job.unread, [part["unread"] for part in parts])
        if self._reads_back and job.former is None:  # a kill may have come before older ones went
            self._let_go(job.step, counts=False)
        for path in paths:
            path.unlink()
        version = integrity.ORDERED if any(x.order for x in found.values()) else 1
        record = Record(job.step, files, found, job.metric, version)
        integrity.write_record(saving, record, self._steps.keys)
        self._steps.commit(job.step)

    def check(self, step: int, number: int) -> None:
        """Reads a step back and lets older ones go. number: of its save.

        Raises: ReadBackError when the step is not what was written.
        """
        found: Found = {"wrong": []}
        if self._reads_back:
            mine = self._share(step)
            if self._parts == 1:
                found = self._judge(step, [mine])
            else:
                key = f"megajax_read_{number}"
                found = storage.agree(key, mine, lambda said: self._judge(step, said))
        if self._part == 0:
            with self._steps.cleaning:
                self._let_go(step)
        if found.get("wrong"):
            self._bad.add(step)
            raise ReadBackError(str(marks.refuted(self._steps.step(step), found["wrong"])))

    def empty(self) -> None:
        """Frees the bytes of the steps that were let go. Raises: OSError, StoreError."""
        if self._part == 0:
            with self._steps.cleaning:
                self._steps.empty()

    def _share(self, step: int) -> Found:
        """Reads this process's share of a step back: what is wrong, a second time too.

        A store that answers late, or a folder that somebody moves and puts back, makes whole bytes
        look wrong once; a step that is called wrong does not count any more.
        """
        folder = self._steps.step(step)
        try:
            record = self._steps.record(step)
            if record is None:
                return {"unknown": "it has no record"}
            share = folder, record, self._part, self._parts
            wrong = read_back.wrong_parts(*share) and read_back.wrong_parts(*share)
            if wrong and self._steps.record(step) != record:
                return {"unknown": "it was saved again meanwhile"}
        except Exception as error:  # tensorstore raises many kinds
            return {"unknown": storage.reason(error)}
        return {"wrong": wrong[: marks.SAID]}

    def _judge(self, step: int, found: Sequence[Found]) -> Found:
        """Marks a step that was read back, and says loudly when it is not what was written."""
        wrong = [what for one in found for what in one.get("wrong", ())]
        unknown = next((one["unknown"] for one in found if "unknown" in one), None)
        folder = self._steps.step(step)
        if wrong:
            self.refuted.append(step)
            logging.error(
                "%s. It does not count any more; older steps stay", marks.refuted(folder, wrong)
            )
        elif unknown is not None:
            logging.warning(
                "step %d of %s was not read back (%s): older steps stay until it is",
                step, self._steps.path, unknown,
            )  # fmt: skip
            return {"unknown": unknown}
        try:
            record = self._steps.record(step)
            assert record is not None
            marks.write(folder, record, wrong)
        except (OSError, CheckpointError) as error:
            logging.warning("step %d of %s is not marked: %s", step, self._steps.path, error)
        return {"wrong": wrong[: marks.SAID]}

    def _let_go(self, saved: int, counts: bool = True) -> None:
        """Removes what need not be kept.

        saved: a step that stays in every case. counts: it is one of those that let others go. An
        older copy that is about to be replaced is not: it may be why the step is saved again,
        whether a restore found it damaged or a listing of a store left it out.
        """
        try:
            if self._steps.lease is not None and self._steps.lease.is_lost():
                return  # the newer attempt does it
            bad = self._bad if counts else self._bad | {saved}
            self._steps.retain(self._keep, self._best, bad, saved, self._reads_back)
        except (OSError, CheckpointError) as error:  # the step counts all the same
            logging.warning("older steps than %d stay: %s", saved, error)
