"""Places to save in where other things happen too, and an oracle of what is stored there.

`Junk` is a folder in which things appear that are no steps, and in which good steps go bad while
nobody saves. `LyingStore` is a bucket on loopback whose listings and answers are not true. Both
know by an oracle of their own (plain tensorstore, the bytes that must be there) which steps are
good, and raise when a good step went though fewer than `keep` newer good ones are there.
"""

import ctypes
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from tests.checkpoint import object_servers

RECORD, METADATA = "integrity.json", "_CHECKPOINT_METADATA"
State = Callable[[int], dict[str, np.ndarray]]
LEAVINGS = (".saving", ".trash")
LATE_S = 30.0  # for a store to answer what a dead process had sent
PAUSE_S = 0.02  # between two disturbances while a victim saves


def holds(folder: Path, step: int, state: dict[str, np.ndarray]) -> bool:
    """Tells whether a folder holds this step, whatever the checkpoint manager says of it."""
    import tensorstore as ts

    try:
        record = json.loads((folder / RECORD).read_bytes())["record"]
        if record["step"] != step:
            return False
        folder = folder / (record.get("home") or "")  # of a step that was saved again in a store
        for name, x in state.items():
            base = {"driver": "file", "path": f"{folder}/state/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            array: Any = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
            if array.read().result().tobytes() != x.tobytes():
                return False
    except Exception:  # tensorstore raises many kinds; whatever it is, the step is not good
        return False
    return True


class Hostile:
    """What both places have in common: who was good, and a thread that disturbs."""

    def __init__(self, keep: int, state: State, random: np.random.Generator):
        """keep: of the victims. state: what they save as a step."""
        self._keep, self._state, self._random = keep, state, random
        self._good: set[int] = set()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.done = 0  # disturbances

    def steps(self) -> set[int]:
        """Returns the good steps that are there, as the oracle sees it."""
        raise NotImplementedError

    def spoil(self) -> None:
        """Disturbs while nobody saves; a good step stays."""
        raise NotImplementedError

    def disturb(self) -> None:
        """Disturbs while a victim saves; no step goes bad by it."""
        raise NotImplementedError

    def begin(self) -> None:
        """Lets the disturbances of a save begin."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            self.disturb()

    def end(self) -> None:
        """Ends them."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def must_come_back(self) -> int:
        """Disturbs before a restart, and returns the oldest step that a restore may find."""
        self.spoil()
        return max(self._good, default=0)

    def look(self, saved: list[int]) -> dict[str, Any]:
        """Checks after a kill. saved: reported as such since the last look. Raises: UserError."""
        self.end()
        now = self.steps()
        for gone in sorted((self._good | set(saved)) - now):
            newer = sum(s > gone for s in now)
            if newer < self._keep:
                raise UserError(
                    f"step {gone} was good and is gone; newer good ones: {newer} of {self._keep}; "
                    f"good before: {sorted(self._good)}, saved since: {saved}, now: {sorted(now)}"
                )
        lost = len((self._good | set(saved)) - now)
        self._good = now
        return {"good": sorted(now), "retired": lost, "disturbances": self.done}

    def close(self) -> None:
        """Ends what serves the place."""
        self.end()


class Junk(Hostile):
    """A folder on a disk."""

    def __init__(self, folder: Path, keep: int, state: State, random: np.random.Generator):
        """folder: need not exist yet."""
        super().__init__(keep, state, random)
        self._folder = folder
        self._workshop = Path(tempfile.mkdtemp(dir=folder.parent, prefix="workshop"))
        self._spoilt: dict[int, tuple[int, ...]] = {}
        self._ours: set[str] = set()
        self._numbers = itertools.count()

    def steps(self) -> set[int]:
        """Returns the good steps but those that were spoilt here."""
        steps = set()
        for name in os.listdir(self._folder) if self._folder.exists() else ():
            if name.isascii() and name.isdecimal() and str(int(name)) == name:
                step, place = int(name), self._folder / name
                if self._spoilt.get(step, ()) != _identity(place) and step < 10**5:
                    steps |= {step} if holds(place, step, self._state(step)) else set()
        return steps

    def must_come_back(self) -> int:
        """As in general; what could not be read can be read again, so a start can remove it."""
        self._open()
        return super().must_come_back()

    def _open(self) -> None:
        for path in self._folder.iterdir() if self._folder.exists() else ():
            if not path.is_symlink() and not path.stat().st_mode & 0o777:
                path.chmod(0o755)

    def spoil(self) -> None:
        """Junk, and in one of two times a bit, a length or a file of a good step, not the last."""
        for _ in range(int(self._random.integers(1, 5))):
            self.disturb()
        if len(self._good) >= 2 and self._random.random() < 0.5:
            step = max(self._good) if self._random.random() < 0.7 else min(self._good)
            self._spoil_step(step)
            self._good.discard(step)

    def _spoil_step(self, step: int) -> None:
        place = self._folder / str(step)
        files = [f for f in sorted(place.rglob("*")) if f.is_file() and f.stat().st_size]
        data = max(files, key=lambda f: f.stat().st_size)
        self._spoilt[step] = _identity(place)
        match int(self._random.integers(0, 6)):
            case 0 | 1:
                with open(data, "r+b") as file:
                    at = int(self._random.integers(0, data.stat().st_size))
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << int(self._random.integers(0, 8))]))
            case 2:
                os.truncate(data, data.stat().st_size // 2)
            case 3:
                data.unlink()
            case 4:
                os.truncate(place / RECORD, (place / RECORD).stat().st_size // 2)
            case _:
                (place / RECORD).unlink()

    def disturb(self) -> None:
        """One thing appears that is no step, in one piece, where nothing of its name is."""
        self.done += 1
        made = self._workshop / str(next(self._numbers))
        near = max(self._good, default=0) + int(self._random.integers(-6, 12))
        far = int(self._random.choice([near, near, near, 10**5 + near, 10**9 + near]))
        names = [str(max(far, 0))] * 6 + [f"0{far}", "²", "\u0669", f"{near}x", ".x", "lost+found"]
        name = str(self._random.choice([*names, f"{10**5 + near}.saving", f"{10**6}.trash"]))
        try:
            self._make(made, max(near, 0))
            target = self._folder / name
            if not self._folder.exists() or os.path.lexists(target):
                return  # of a victim, or of ours
            if made.is_dir() and not made.is_symlink():
                made.rename(target)  # refused when a step has just got this name
            else:
                os.link(made, target, follow_symlinks=False)  # a rename would replace
            self._ours.add(name)
            if name.isdecimal() and self._thread is not None and self._random.random() < 0.1:
                target.chmod(0)
        except OSError:
            pass  # the victim was quicker
        finally:
            _remove(made)

    def _make(self, made: Path, near: int) -> None:
        kind = int(self._random.integers(0, 10))
        good = sorted(self._good)
        if kind == 8:
            made.write_text("a file\n")
            return
        if kind == 9:
            made.symlink_to("nowhere")
            return
        made.mkdir()
        if kind == 7 and good:  # a copy of a good step under another's number
            source = self._folder / str(good[int(self._random.integers(len(good)))])
            shutil.copytree(source, made, dirs_exist_ok=True)
            return
        texts = [
            "",
            "{}",
            "[1]",
            '{"custom_metadata": {"megajax.integrity": 1}}',
            "{" * 5000,
            '{"item_handlers": {}, "custom_metadata": {}}',
            "\xff\x00",
        ]
        (made / METADATA).write_text(texts[kind % len(texts)])
        other = json.dumps({"crc32": "00000000", "record": {"step": near, "files": {}}})
        records = ["", '{"crc32": "00000000", "record": {}}\n', '{"crc32": "0', "[" * 9000, other]
        if kind >= 2:
            (made / RECORD).write_text(records[kind % len(records)])

    def look(self, saved: list[int]) -> dict[str, Any]:
        """As in general."""
        self.end()
        self._open()
        return super().look(saved)

    def tidy(self, most: int) -> int:
        """Checks that a start has removed what killed saves left. Returns: bytes of the rest.

        most: steps that may be there. Raises: UserError.
        """
        names = os.listdir(self._folder) if self._folder.exists() else []
        steps = [n for n in names if n not in self._ours]
        left = [n for n in steps if n[0] in "123456789" and any(w in n for w in LEAVINGS)]
        odd = [n for n in steps if not (n.isdecimal() or n.startswith(("attempt.", ".attempt")))]
        if left or odd or len(steps) > most + len(self._spoilt):
            raise UserError(f"{self._folder} has grown: left {left}, unknown {odd}, steps {steps}")
        trees = [self._folder / n for n in steps]
        return sum(f.stat().st_size for t in trees for f in t.rglob("*") if f.is_file())

    def close(self) -> None:
        """Removes the workshop."""
        super().close()
        shutil.rmtree(self._workshop, ignore_errors=True)


def obey_modes() -> None:
    """Gives up root's right to read and write what modes forbid, here and in what is forked."""

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    libc, header, sets = ctypes.CDLL(None), Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(ctypes.byref(header), sets) == 0:
        for at in (0, 1):  # effective, permitted: capability.h's DAC_OVERRIDE, DAC_READ_SEARCH
            sets[at] &= ~(1 << 1 | 1 << 2) & 0xFFFFFFFF
        libc.capset(ctypes.byref(header), sets)


def _identity(place: Path) -> tuple[int, ...]:
    """Tells a folder from another that got its name."""
    try:
        return (place.stat().st_ino, (place / "state").stat().st_ino)
    except OSError:
        return ()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class Bucket(dict[str, bytes]):
    """Objects of a store that does not keep what it accepts. alters: None: it forgets a body."""

    alters: Callable[[str, bytes], bytes | None] = staticmethod(lambda key, body: body)

    def __setitem__(self, key: str, body: bytes) -> None:
        """Takes what is sent."""
        body_stored = self.alters(key, body)
        if body_stored is not None:
            super().__setitem__(key, body_stored)


class Server(object_servers.ObjectServer):
    """A server that knows of how many connections it still has requests to answer."""

    def __init__(self):
        """Nobody is there."""
        self.open = 0
        super().__init__()

    def process_request_thread(self, request, client_address):
        """Answers one connection to its end."""
        with self.guard:
            self.open += 1
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.guard:
                self.open -= 1


class LyingStore(Hostile):
    """A bucket that forgets and cuts what it accepted, lists what it has not, hides what it has."""

    def __init__(
        self, prefix: str, keep: int, state: State, random: np.random.Generator, scratch: Path
    ):
        """prefix: of the run in the bucket. scratch: a folder for the oracle."""
        super().__init__(keep, state, random)
        self.server = Server()
        self._objects = self.server.objects = Bucket()
        self._prefix, self._scratch = prefix, scratch
        self._known: dict[tuple[int, int], bool] = {}

    @property
    def address(self) -> str:
        """Returns where victims save."""
        return f"s3://{object_servers.BUCKET}/{self._prefix}"

    def environment(self) -> dict[str, str]:
        """Returns what victims must know."""
        return {
            "AWS_ENDPOINT_URL": self.server.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": object_servers.KEY,
            "AWS_SECRET_ACCESS_KEY": object_servers.SECRET,
            "TMPDIR": str(self._scratch),
        }

    def new_run(self, prefix: str) -> None:
        """Begins in another prefix; the bucket is emptied."""
        self._honest()
        self.server.objects.clear()
        self._prefix, self._good = prefix, set()

    def steps(self) -> set[int]:
        """Returns the steps of which every object is right."""
        steps = set()
        held: dict[int, dict[str, bytes]] = {}
        for key, content in list(self.server.objects.items()):
            step, _, name = key.removeprefix(f"{self._prefix}/").partition("/")
            if step.isdecimal() and name:
                held.setdefault(int(step), {})[name] = content
        for step, objects in held.items():
            if RECORD not in objects:
                continue
            what = (step, hash(frozenset((n, hash(c)) for n, c in objects.items())))
            if what not in self._known:
                self._known[what] = self._is_good(step, objects)
            steps |= {step} if self._known[what] else set()
        return steps

    def _is_good(self, step: int, objects: dict[str, bytes]) -> bool:
        with tempfile.TemporaryDirectory(dir=self._scratch) as name:
            for key, content in objects.items():
                path = Path(name) / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return holds(Path(name), step, self._state(step))

    def _honest(self) -> None:
        self.server.ghosts, self.server.hidden = set(), lambda key: False
        self._objects.alters = lambda key, body: body
        self.server.fail = 0

    def _guessed(self) -> list[str]:
        newest = max(self._good, default=0)
        numbers = [*range(max(newest - 6, 0), newest + 8), 10**5, 10**9]
        objects = (RECORD, METADATA, "unfinished", "state/manifest.ocdbt")
        return [f"{self._prefix}/{n}/{o}" for n in numbers for o in objects]

    def _lie(self, spared: set[int]) -> None:
        random, keys = self._random, self._guessed()
        self.server.ghosts = set(random.choice(keys, int(random.integers(0, 10))).tolist())
        prefixes = tuple(f"{self._prefix}/{s}/" for s in spared)
        hidden = {
            k
            for k in random.choice(keys, int(random.integers(0, 10))).tolist()
            if not k.startswith(prefixes or "\0")
        }
        self.server.hidden = lambda key: key in hidden
        self.server.fail = int(random.choice([0, 5, 9]))

    def spoil(self) -> None:
        """Listings lie, though not of the newest step; a step that is not listed is not there."""
        self._honest()
        self._lie({max(self._good)} if self._good else set())
        good = sorted(self._good)
        if len(good) >= 2 and self._random.random() < 0.4:  # and one object of a step goes bad
            names = [
                k
                for k, c in self.server.objects.items()
                if k.startswith(f"{self._prefix}/{good[-1]}/") and c
            ]
            key = max(names, key=lambda k: len(self.server.objects[k]))
            content = self.server.objects[key]
            at = int(self._random.integers(0, len(content)))
            flipped = content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]
            self._objects.update({key: flipped if self._random.random() < 0.7 else content[:at]})
            self._good = self.steps()
            self._lie({max(self._good)} if self._good else set())

    def disturb(self) -> None:
        """Other lies, about all steps; some of what is sent now is lost, cut or changed."""
        self.done += 1
        self._lie(set())
        kind, of = int(self._random.integers(0, 8)), int(self._random.integers(2, 40))

        def alter(key: str, body: bytes) -> bytes | None:
            if hash((key, of)) % of or not key.startswith(self._prefix):
                return body
            if kind == 0:
                return None
            if kind == 1:
                return body[: len(body) // 2]
            return bytes([body[0] ^ 1, *body[1:]]) if kind == 2 and body else body

        self._objects.alters = alter

    def look(self, saved: list[int]) -> dict[str, Any]:
        """As in general, once what the victim had sent has been answered: a PUT that is on its way
        when its sender dies could replace an object of whoever saves the same step next."""
        self.end()
        late, end = self.server.open, time.monotonic() + LATE_S
        while self.server.open:
            if time.monotonic() > end:
                raise UserError(f"the store still answers {self.server.open} connections")
            time.sleep(0.005)
        return super().look(saved) | {"late": late}

    def tidy(self, most: int) -> int:
        """Returns the bytes in the bucket; what killed saves left goes with the next save."""
        # A step that is listed and not there may get a mark, which is an empty object.
        keys = [k for k, c in list(self.server.objects.items()) if c]
        held = {k.split("/")[1] for k in keys if k.count("/") > 1}
        if len(held) > most + 3:  # one in the midst of going, one of coming, one that went bad
            raise UserError(f"the bucket has grown: {sorted(held)}")
        return sum(len(c) for c in list(self.server.objects.values()))

    def close(self) -> None:
        """Ends the server."""
        super().close()
        self.server.shutdown()
        self.server.server_close()
