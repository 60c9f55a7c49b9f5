"""Whether a step is what was saved: its integrity record, its signature, and the mark of a
read-back.

Orbax checks its indices, not the arrays: a flipped bit in one loads without a word. Here the last
file written into a step is integrity.json: a CRC-32 (zlib's) of every 16 MiB of every other file,
the fingerprint of every leaf (sealing.py), and a CRC-32 of the record itself. A step is good
when its record and its files match these checksums. No jax: a tool on a login node reads records.
"""

import errno
import hashlib
import hmac
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from isal import isal_zlib

from megajax.checkpoint.store import CheckpointError, ObjectPath, StoreError, stored_values
from megajax.core.errors import UserError
from megajax.core.files import expand, open_regular, parse_json, read_bytes

# ---- keys and signatures
#
# Signed integrity records: who has the key wrote the step, byte for byte.
#
# Checksums and fingerprints protect from accidents; whoever can write where the checkpoints lie can
# mend them. With a key file the record carries an HMAC-SHA256 of its text, and SHA-256 sums of all
# files of the step besides the checksums. The file holds one key a line, each of at least KEY_BYTES
# bytes; the first one signs, all of them verify, so a key is replaced by putting a new line first.
# Make one with `openssl rand -hex 32`. Not protected: which of the signed steps is there (an older
# one can be put back, or one of another run with the same key).


KEY_BYTES = 16  # at least (128 bits)
MAX_FILE = 2**16  # (chosen) bytes of a key file
MEANING = b"megajax checkpoint record 1\n"  # nothing else that is signed with the key begins so
FLAG = "(--checkpoint.key_file)"


class Keys:
    """The keys of a file. They appear in no message."""

    def __init__(self, path: str | Path):
        """Raises: CheckpointError for a file that others can read, or that holds no key."""
        self.path = expand(path)
        try:
            with open_regular(self.path) as file:
                _check_owner(self.path, os.fstat(file.fileno()))
                text = file.read(MAX_FILE + 1)
        except OSError as error:
            raise CheckpointError(
                f"cannot read the key file {self.path}: {error.strerror} {FLAG}"
            ) from None
        except CheckpointError:
            raise
        except UserError as error:
            raise CheckpointError(f"{error} {FLAG}") from None
        lines = [line.strip() for line in text.splitlines()]
        self._keys = [line for line in lines if line]
        short = [n for n, line in enumerate(lines, 1) if 0 < len(line) < KEY_BYTES]
        if not self._keys or short or len(text) > MAX_FILE:
            where = f"line {short[0]} is shorter" if short else "it holds none"
            if len(text) > MAX_FILE:
                where = f"it has more than {MAX_FILE} bytes"
            raise CheckpointError(
                f"{self.path} must hold one key a line, of {KEY_BYTES} bytes or more: {where}; "
                f"make one with: openssl rand -hex 32 {FLAG}"
            )

    def __repr__(self) -> str:
        """Returns what may be shown."""
        return f"{len(self._keys)} keys of {self.path}"

    def sign(self, text: bytes) -> str:
        """Returns the signature of a text, by the first key."""
        return self._sum(self._keys[0], text)

    def is_signed(self, text: bytes, signature: str) -> bool:
        """Tells whether one of the keys signed a text."""
        said = signature.encode(errors="surrogatepass")  # a forged one may hold any character
        matches = [hmac.compare_digest(self._sum(key, text).encode(), said) for key in self._keys]
        return any(matches)

    def refusal(self, text: bytes, signature: str, bare: Sequence[str]) -> str:
        """Returns why a record is not one that a key signed, and what to do; or nothing.

        bare: files of the record without SHA-256.
        """
        if not signature:
            return (
                f"it is not signed, and only signed steps count {FLAG}; if you know who wrote it, "
                "restore it without a key and save it again with one"
            )
        if not self.is_signed(text, signature):
            return (
                f"it was signed with none of the {self!r}: it is forged or damaged, or of another "
                f"key, which can be added to that file as a line after the first {FLAG}"
            )
        return f"it says no SHA-256 of {bare[0]}; save the step again {FLAG}" if bare else ""

    @staticmethod
    def _sum(key: bytes, text: bytes) -> str:
        return hmac.new(key, MEANING + text, hashlib.sha256).hexdigest()


def _check_owner(path: Path, facts: os.stat_result) -> None:
    """Raises CheckpointError for a key file that another user could read or change.

    A group may read what root owns: that is how a service is given a key.
    """
    open_to = facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if facts.st_uid == 0:
        open_to &= ~stat.S_IRGRP
    if open_to:
        raise CheckpointError(
            f"{path} has the mode {stat.S_IMODE(facts.st_mode):04o}: others can read or change the "
            f"key; chmod 600 {path} {FLAG}"
        )
    if facts.st_uid not in (0, os.geteuid()):
        raise CheckpointError(
            f"{path} belongs to user {facts.st_uid}, who could change the key; it must belong to "
            f"this user or to root {FLAG}"
        )


# ---- the record
#
# The record is {"crc32": "xxxxxxxx", "record": ...}, one line; the checksum is of the text of the
# record as it stands. With a key, "hmac": "..." comes before "record", and each file
# has the SHA-256 of its chunks' SHA-256 sums.


RECORD = "integrity.json"
MARK = "read_back.json"  # what reading the step back found; the record does not know it
PART = "integrity.part-"  # what one process of a job found, until the record is written
CHUNK = 16 * 2**20  # bytes a checksum covers (chosen: a read that disks do at full rate)
SMALL = 64 * 2**10  # files up to here are checked even when a check is to be fast
BLOCK = 2**20  # bytes read at once (chosen: they stay in the cache for the checksum)
MAX_RECORD = 2**30  # (chosen) bytes of a record; one of 10 TB has 8 MB of checksums
WORKERS = 4  # threads that read; reads and checksums let go of the interpreter lock


class DamagedError(CheckpointError):
    """Stored bytes are not what was saved. The message names step, file, leaf and remedy."""


class UnreadableError(CheckpointError):
    """Something is stored and this process may not look at it: neither absent nor damaged."""


class ForbiddenError(UnreadableError):
    """This user may not look at something that is stored: other steps count without it."""


# What says nothing of the bytes: they may be whole.
_CLOSED = frozenset(
    getattr(errno, name) for name in "EACCES EPERM ESTALE ETIMEDOUT EMFILE ENFILE".split()
)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def absent(path: Path, error: OSError, any_other: bool = True) -> OSError:
    """Returns the error if it means that the file does not exist; raises if the file is unreadable.

    any_other: whether every other error counts as unreadable. If not, only the errors of _CLOSED
    do, and all others are returned.
    Raises: UnreadableError; ForbiddenError where permissions are why.
    """
    if error.errno in _ABSENT or not (any_other or error.errno in _CLOSED):
        return error
    forbidden = error.errno in (errno.EACCES, errno.EPERM)
    raise (ForbiddenError if forbidden else UnreadableError)(
        f"cannot read {path}: {error.strerror or error}; what is stored there is not known. "
        "Make it readable for this user, or move it away"
    ) from None


@dataclass(frozen=True)
class FileSum:
    """What a file must be: its bytes, the CRC-32 of each chunk, and the SHA-256 of the SHA-256 sums
    of all chunks (empty: nobody signed)."""

    bytes: int
    crc32: list[int]
    sha256: str = ""


@dataclass(frozen=True)
class LeafSum:
    """What a leaf must be. fingerprint: checkpoint/sealing.py. order: the row of the model at
    each place of the first dimension; empty: each row is at its own place."""

    shape: list[int]
    dtype: str
    fingerprint: list[int]
    order: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """What step `step` must be.

    home: the folder below the step's own in which its files are: of a step that was saved again in
    a store. signature: that the record carried; of the text, so it is no part of it.
    """

    step: int
    files: dict[str, FileSum]
    leaves: dict[str, LeafSum]
    metric: float | None = None
    version: int = 1
    home: str = ""
    signature: str = field(default="", compare=False)

    def text(self) -> str:
        """Returns the record as it is written, checked and signed."""
        members = asdict(self)
        del members["signature"]
        if not self.home:
            del members["home"]  # which older readers do not know
        for file in members["files"].values():
            if not file["sha256"]:
                del file["sha256"]
        for leaf in members["leaves"].values():
            if not leaf["order"]:
                del leaf["order"]
        return json.dumps(members, separators=(",", ":"))


@dataclass(frozen=True)
class Damage:
    """One thing wrong with a file. spans: the byte ranges that differ."""

    file: str
    what: str
    spans: list[tuple[int, int]] = field(default_factory=list)


def write_record(folder: Path, record: Record, keys: Keys | None = None) -> None:
    """Writes the record of a step, and returns when it is on the disk. keys: to sign it with."""
    body = record.text()
    write_file(folder / RECORD, seal_text(body, keys.sign(body.encode()) if keys else ""))
    sync_folder(folder)


def write_file(path: Path, text: str) -> None:
    """Writes a small file, and returns when it is on the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_record(folder: Path, keys: Keys | None = None) -> Record:
    """Returns the record of a step.

    keys: of which one must have signed it. Raises: DamagedError when there is none, or it is
    damaged, or was not signed so.
    """
    path = folder / RECORD
    try:
        raw = path.read_bytes() if isinstance(path, ObjectPath) else read_bytes(path, MAX_RECORD)
        text = raw.decode()
        head = HEAD.match(text)
        body = text[head.end() : -2] if head else ""
        checksum = f"{isal_zlib.crc32(body.encode()):08x}"
        if head is None or checksum != head[1] or not text.endswith("}\n"):
            raise ValueError("its checksum is not that of its text")
        signature = head[2] or ""
        members = parse_json(body)
        files = {_inside(n): FileSum(**f) for n, f in members.pop("files").items()}
        leaves = {n: LeafSum(**x) for n, x in members.pop("leaves").items()}
        if "signature" in members:
            raise ValueError("it says itself that it is signed")
        record = _check_record(Record(files=files, leaves=leaves, signature=signature, **members))
        bare = [name for name, file in files.items() if not file.sha256]
        if keys is not None and (why := keys.refusal(body.encode(), signature, bare)):
            raise DamagedError(f"step {folder.name} of {folder.parent}: {RECORD}: {why}")
        return record
    except (StoreError, DamagedError):
        raise
    except OSError as error:
        what = absent(path, error, any_other=False).strerror or str(error)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        what = f"damaged: {error}"
    raise DamagedError(f"step {folder.name} of {folder.parent}: {RECORD}: {what}; {REMEDY}")


HEAD = re.compile(r'\{"crc32": "([0-9a-f]{8})", (?:"hmac": "([0-9a-f]{64})", )?"record": ')
ORDERED = 2  # version of a record with leaves in another order: readers before it refuse the step
COPY = "copy-"  # what the name of a record's home begins with
HOME = re.compile(rf"{COPY}[0-9a-f]{{8}}")


def check_small_files(folder: Path, record: Record) -> None:
    """Raises DamagedError when a file that describes the step is not as it was saved."""
    files = {n: f for n, f in record.files.items() if os.sep not in n}
    if damage := find_damage(folder, replace(record, files=files)):
        raise damaged(folder, damage, home=record.home)


def unrecorded_files(folder: Path, record: Record) -> list[Damage]:
    """Returns the files in state/ that the record does not list, so that no key signed them."""
    folder = folder / record.home
    there = folder.names() if isinstance(folder, ObjectPath) else list_files(folder)
    names = [n for n in there if n.startswith("state/") and n not in record.files]
    return [Damage(n, "it is not in the signed record") for n in names]


GONE = "restore a newer one, or let the run keep more (--checkpoint.keep)"


def _inside(name: str) -> str:
    """Returns the name of a file below a step's folder. Raises: ValueError for any other."""
    if not name or "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name[:200]!r} leads out of the step's folder")
    return name


def _check_record(record: Record) -> Record:
    """Returns a record whose every member is of its type. Raises: ValueError."""
    if type(record.step) is not int or record.version not in (1, ORDERED):
        raise ValueError(f"step {record.step!r:.40}, version {record.version!r:.40}")
    if record.home != "" and not HOME.fullmatch(record.home):
        raise ValueError(f"{record.home!r:.40} is no home of files")
    if record.metric is not None and type(record.metric) not in (int, float):
        raise ValueError("a metric that is no number")
    for name, file in record.files.items():
        chunks = _naturals(file.crc32, 2**32)
        if type(file.bytes) is not int or chunks != -(-file.bytes // CHUNK):
            raise ValueError(f"{name[:200]} has {chunks} checksums for {file.bytes!r:.40} bytes")
        if not isinstance(file.sha256, str):
            raise ValueError(f"{name[:200]} has a SHA-256 that is no text")
    for name, leaf in record.leaves.items():
        if not isinstance(leaf.dtype, str):
            raise ValueError(f"leaf {name[:200]} has a dtype that is no text")
        if _naturals(leaf.shape, 2**62) > 64:
            raise ValueError(f"leaf {name[:200]} has {len(leaf.shape)} dimensions")
        _naturals(leaf.fingerprint, 2**64)
        rows = _naturals(leaf.order, 2**62)  # counted first: a shape may claim any number
        if rows and (leaf.shape[:1] != [rows] or sorted(leaf.order) != list(range(rows))):
            raise ValueError(f"leaf {name[:200]} has an order that is none of its rows")
    return record


def _naturals(values: Any, above: int) -> int:
    """Returns how many there are in a list of whole numbers from 0. Raises: ValueError."""
    if not isinstance(values, list) or any(
        type(n) is not int or not 0 <= n < above for n in values
    ):
        raise ValueError(f"what is no list of whole numbers below {above}")
    return len(values)


REMEDY = "restore another step, or copy this one again from where it came"


def seal_text(body: str, signature: str = "") -> str:
    """Returns the text of the file RECORD for the text of a record."""
    signed = f'"hmac": "{signature}", ' if signature else ""
    return f'{{"crc32": "{isal_zlib.crc32(body.encode()):08x}", {signed}"record": {body}}}\n'


def list_files(folder: Path) -> list[str]:
    """Returns the files of a step, relative and sorted, without the record, its parts and mark."""
    paths = (
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, names in os.walk(folder)
        for name in names
    )
    return sorted(n for n in paths if n not in (RECORD, MARK) and not n.startswith(PART))


def sum_files(
    folder: Path,
    names: Sequence[str],
    sizes: Mapping[str, int] | None = None,
    sha256: Collection[str] = (),
) -> dict[str, FileSum]:
    """Reads files and returns their sizes and checksums.

    sizes: if they are known. sha256: the files whose SHA-256 is computed too.
    Raises: OSError.
    """
    sizes = {n: (folder / n).stat().st_size for n in names} if sizes is None else sizes
    pieces = [(n, i, min(CHUNK, sizes[n] - i)) for n in names for i in range(0, sizes[n], CHUNK)]
    sums: dict[str, list[int]] = {n: [] for n in names}
    trees = {n: hashlib.sha256() for n in names if n in sha256}
    chunk_sums = _at_once(
        WORKERS, lambda p: _chunk_sums(folder / p[0], p[1], p[2], p[0] in trees), pieces
    )
    for (name, *_), (crc, digest) in zip(pieces, chunk_sums, strict=True):
        sums[name].append(crc)
        if name in trees:
            trees[name].update(digest)
    return {
        n: FileSum(sizes[n], sums[n], trees[n].hexdigest() if n in trees else "") for n in names
    }


def _at_once(workers: int, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Returns call(item) of each item, computed by `workers` threads."""
    if not threading.main_thread().is_alive():  # the interpreter ends and takes no new threads
        return [call(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(call, items))


def _chunk_sums(path: Path, offset: int, length: int, sha256: bool) -> tuple[int, bytes]:
    """Returns (CRC-32, SHA-256 or nothing) of a part of a file.

    Intel's ISA-L computes zlib's CRC-32 ten times as fast: 18 GB/s on one core, measured.
    """
    digest = hashlib.sha256()
    if isinstance(path, ObjectPath):
        content = path.read_range(offset, length)
        if sha256:
            digest.update(content)
        return isal_zlib.crc32(content), digest.digest()
    crc, left, block = 0, length, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while left and (count := file.readinto(block[: min(left, BLOCK)])):
            crc = isal_zlib.crc32(block[:count], crc)
            if sha256:
                digest.update(block[:count])
            left -= count
    return crc, digest.digest()


def find_damage(folder: Path, record: Record, fast: bool = False) -> list[Damage]:
    """Returns what is wrong with the files of a step; fast: sizes, and the bytes of small files.

    A file that the record does not know is no damage: nothing reads it.
    """
    folder = folder / record.home
    damage, to_read = [], []
    known = record.files.items()
    sizes = _at_once(4 * WORKERS, lambda f: _size(folder / f[0], f[1].bytes), known)
    for (name, expected), size in zip(record.files.items(), sizes, strict=True):
        if isinstance(size, OSError):
            damage.append(Damage(name, f"{size.strerror}"))
        elif size != expected.bytes:
            damage.append(Damage(name, f"{size} bytes instead of {expected.bytes}"))
        elif not fast or size <= SMALL:
            to_read.append(name)
    try:
        secret = {n for n in to_read if record.files[n].sha256}
        sums = sum_files(folder, to_read, {n: record.files[n].bytes for n in to_read}, secret)
    except OSError as error:
        absent(Path(error.filename or folder), error, any_other=False)
        return [*damage, Damage(str(error.filename), f"{error.strerror}")]
    for name in to_read:
        pairs = zip(sums[name].crc32, record.files[name].crc32, strict=True)
        bad = [i * CHUNK for i, (now, then) in enumerate(pairs) if now != then]
        if bad:
            spans = [(b, min(b + CHUNK, sums[name].bytes)) for b in bad]
            where = ", ".join(f"{a}..{b}" for a, b in spans[:3])
            damage.append(Damage(name, f"bytes {where} are not what was saved", spans))
        elif sums[name].sha256 != record.files[name].sha256:
            damage.append(Damage(name, "its SHA-256 is another, and its checksums agree: forged"))
    return damage


def _size(path: Path, likely: int) -> int | OSError:
    """Returns a file's size, or why there is none. likely: a store does not tell, it compares."""
    try:
        return path.size(likely) if isinstance(path, ObjectPath) else path.stat().st_size
    except OSError as error:
        return absent(path, error, any_other=False)


def damaged(
    folder: Path, damage: Sequence[Damage], leaves: Sequence[str] = (), home: str = ""
) -> DamagedError:
    """Returns the error that names the step, its damaged files and its damaged leaves.

    leaves: if they are known; else the index tells which lie in the damage. home: of the record.
    """
    if not folder.is_dir():  # by a run that goes on, which keeps its newest steps only
        return DamagedError(
            f"step {folder.name} of {folder.parent} was removed while it was read; {GONE}"
        )
    held = leaves or leaves_in(folder / home, damage)
    parts = [f"{d.file}: {d.what}" for d in damage[:5]]
    if held:
        more = f" and {len(held) - 5} more" if len(held) > 5 else ""
        parts.append(f"leaf {', '.join(held[:5])}{more}")
    return DamagedError(
        f"step {folder.name} of {folder.parent} is damaged: {'; '.join(parts)}; {REMEDY}"
    )


def leaves_in(folder: Path, damage: Sequence[Damage]) -> list[str]:
    """Returns the leaves that lie in damaged bytes, as far as the index can still be read."""
    hurt = {d.file: d.spans for d in damage}
    leaves: dict[str, None] = {}
    try:
        for leaf, file, begin, end in stored_values(folder):
            spans = hurt.get(file)
            if spans is not None and (not spans or any(a < end and begin < b for a, b in spans)):
                leaves[leaf] = None
    except Exception:  # the index itself may be what is damaged; tensorstore raises many kinds
        return list(leaves)
    return list(leaves)


# ---- the mark of a read-back
#
# The file read_back.json beside the record says whether a step was read back after it was saved.
#
# A step counts when it has its name; what lies in storage is compared with the devices'
# fingerprints after that (sealing.py). The mark says what was found, so that a later process
# knows: `wrong` is empty when all was as it was written. It names the record that it speaks of: a
# step without a mark, or with a torn one, or one of another save of the same step, was not read
# back.


MAX_MARK = 2**24  # (chosen) bytes
SAID = 5  # (chosen) wrong things that a message names, and a mark holds


def identity(record: Record) -> str:
    """Returns the SHA-256 of a record's text, which no other record has."""
    return hashlib.sha256(record.text().encode()).hexdigest()


def write_mark(folder: Path, record: Record, wrong: Sequence[str]) -> None:
    """Writes the outcome of a read-back. wrong: empty when the step is good. Raises: OSError."""
    text = json.dumps({"record": identity(record), "wrong": list(wrong[:SAID])})
    if isinstance(folder, ObjectPath):
        (folder / MARK).write(text.encode())
    else:
        write_file(folder / MARK, text)


def read_mark(folder: Path, record: Record) -> list[str] | None:
    """Returns what was wrong when a step was read back; None: it was not.

    Raises: UnreadableError, StoreError.
    """
    path = folder / MARK
    try:
        raw = path.read_bytes() if isinstance(path, ObjectPath) else read_bytes(path, MAX_MARK)
        members = parse_json(raw)
        wrong = members["wrong"]
        if not isinstance(wrong, list) or members["record"] != identity(record):
            return None
        return [str(what)[:300] for what in wrong]
    except StoreError:
        raise
    except OSError as error:
        absent(path, error, any_other=False)
    except (ValueError, TypeError, KeyError):
        return None
    return None


def refuted(folder: Path, wrong: Sequence[str]) -> DamagedError:
    """Returns the error of a step that is not what was written, though its checksums agree."""
    return DamagedError(
        f"step {folder.name} of {folder.parent} was read back after it was saved and is not what "
        f"was written: {', '.join(wrong)}; storage or memory is faulty; {REMEDY}"
    )
