"""The integrity record of a step: what its files and leaves must be, byte for byte.

Orbax checks its indices, not the arrays: a flipped bit in one loads without a word. Here the last
file written into a step is integrity.json: a CRC-32 (zlib's) of every 16 MiB of every other file,
the fingerprint of every leaf, and a CRC-32 of the record itself. A step is good when its record is
and its files are. No jax: a tool on a login node reads records.

The record is {"crc32": "xxxxxxxx", "record": ...}, one line; the checksum is of the text of the
record as it stands.
"""

import ast
import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isal import isal_zlib

from megajax.checkpoint.store import CheckpointError, ObjectPath, StoreError, kvstore
from megajax.core.files import parse_json, read_bytes

RECORD = "integrity.json"
MARK = "read_back.json"  # what reading the step back found (marks.py); the record does not know it
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


# What says nothing of the bytes: they may be whole.
_CLOSED = (
    errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE,
)  # fmt: skip
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def absent(path: Path, error: OSError, any_other: bool = True) -> OSError:
    """Returns the error if it says that there is no such file.

    any_other: every other error means that the file cannot be looked at; else only those that
    say nothing of its bytes do, and the rest are returned too.
    Raises: UnreadableError.
    """
    if error.errno in _ABSENT or not (any_other or error.errno in _CLOSED):
        return error
    raise UnreadableError(
        f"cannot read {path}: {error.strerror or error}; what is stored there is not known. "
        "Make it readable for this user, or move it away"
    ) from None


@dataclass(frozen=True)
class FileSum:
    """What a file must be: its bytes and the CRC-32 of each chunk."""

    bytes: int
    crc32: list[int]


@dataclass(frozen=True)
class LeafSum:
    """What a leaf must be. fingerprint: checkpoint/fingerprint.py."""

    shape: list[int]
    dtype: str
    fingerprint: list[int]


@dataclass(frozen=True)
class Record:
    """What step `step` must be."""

    step: int
    files: dict[str, FileSum]
    leaves: dict[str, LeafSum]
    metric: float | None = None
    version: int = 1


@dataclass(frozen=True)
class Damage:
    """One thing wrong with a file. spans: the byte ranges that differ."""

    file: str
    what: str
    spans: list[tuple[int, int]] = field(default_factory=list)


def write_record(folder: Path, record: Record) -> None:
    """Writes the record of a step, and returns when it is on the disk."""
    body = json.dumps(asdict(record), separators=(",", ":"))
    write_file(folder / RECORD, _sealed(body))
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


def read_record(folder: Path) -> Record:
    """Returns the record of a step. Raises: DamagedError when there is none or it is damaged."""
    path = folder / RECORD
    try:
        raw = path.read_bytes() if isinstance(path, ObjectPath) else read_bytes(path, MAX_RECORD)
        text = raw.decode()
        body = text[len(_sealed("")) - 2 : -2]
        if _sealed(body) != text:
            raise ValueError("its checksum is not that of its text")
        found = parse_json(body)
        files = {_inside(n): FileSum(**f) for n, f in found.pop("files").items()}
        leaves = {n: LeafSum(**x) for n, x in found.pop("leaves").items()}
        return _check_record(Record(files=files, leaves=leaves, **found))
    except StoreError:
        raise
    except OSError as error:
        what = absent(path, error, any_other=False).strerror or str(error)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        what = f"damaged: {error}"
    raise DamagedError(f"step {folder.name} of {folder.parent}: {RECORD}: {what}; {REMEDY}")


GONE = "restore a newer one, or let the run keep more (--checkpoint.keep)"


def _inside(name: str) -> str:
    """Returns the name of a file below a step's folder. Raises: ValueError for any other."""
    if not name or "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name[:200]!r} leads out of the step's folder")
    return name


def _check_record(record: Record) -> Record:
    """Returns a record whose every member is of its type. Raises: ValueError."""
    if type(record.step) is not int or record.version != 1:
        raise ValueError(f"step {record.step!r:.40}, version {record.version!r:.40}")
    if record.metric is not None and type(record.metric) not in (int, float):
        raise ValueError("a metric that is no number")
    for name, file in record.files.items():
        chunks = _naturals(file.crc32, 2**32)
        if type(file.bytes) is not int or chunks != -(-file.bytes // CHUNK):
            raise ValueError(f"{name[:200]} has {chunks} checksums for {file.bytes!r:.40} bytes")
    for name, leaf in record.leaves.items():
        if not isinstance(leaf.dtype, str):
            raise ValueError(f"leaf {name[:200]} has a dtype that is no text")
        if _naturals(leaf.shape, 2**62) > 64:
            raise ValueError(f"leaf {name[:200]} has {len(leaf.shape)} dimensions")
        _naturals(leaf.fingerprint, 2**64)
    return record


def _naturals(values: Any, above: int) -> int:
    """Returns how many there are in a list of whole numbers from 0. Raises: ValueError."""
    if not isinstance(values, list) or any(
        type(n) is not int or not 0 <= n < above for n in values
    ):
        raise ValueError(f"what is no list of whole numbers below {above}")
    return len(values)


REMEDY = "restore another step, or copy this one again from where it came"


def _sealed(body: str) -> str:
    return f'{{"crc32": "{isal_zlib.crc32(body.encode()):08x}", "record": {body}}}\n'


def list_files(folder: Path) -> list[str]:
    """Returns the files of a step, relative and sorted, without the record, its parts and mark."""
    found = (
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, names in os.walk(folder)
        for name in names
    )
    return sorted(n for n in found if n not in (RECORD, MARK) and not n.startswith(PART))


def sum_files(
    folder: Path, names: Sequence[str], sizes: Mapping[str, int] | None = None
) -> dict[str, FileSum]:
    """Reads files and returns what they are. sizes: as far as they are known. Raises: OSError."""
    sizes = {n: (folder / n).stat().st_size for n in names} if sizes is None else sizes
    pieces = [(n, i, min(CHUNK, sizes[n] - i)) for n in names for i in range(0, sizes[n], CHUNK)]
    sums: dict[str, list[int]] = {n: [] for n in names}
    crcs = _at_once(WORKERS, lambda piece: _chunk_crc(folder / piece[0], *piece[1:]), pieces)
    for (name, *_), crc in zip(pieces, crcs, strict=True):
        sums[name].append(crc)
    return {n: FileSum(sizes[n], sums[n]) for n in names}


def _at_once(workers: int, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Returns what a call says of each item; `workers` threads ask."""
    if not threading.main_thread().is_alive():  # the interpreter ends and takes no new threads
        return [call(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(call, items))


def _chunk_crc(path: Path, offset: int, length: int) -> int:
    """Intel's ISA-L computes zlib's CRC-32 ten times as fast: 18 GB/s on one core, measured."""
    if isinstance(path, ObjectPath):
        return isal_zlib.crc32(path.read_range(offset, length))
    crc, left, block = 0, length, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while left and (count := file.readinto(block[: min(left, BLOCK)])):
            crc = isal_zlib.crc32(block[:count], crc)
            left -= count
    return crc


def find_damage(folder: Path, record: Record, fast: bool = False) -> list[Damage]:
    """Returns what is wrong with the files of a step; fast: sizes, and the bytes of small files.

    A file that the record does not know is no damage: nothing reads it.
    """
    found, whole = [], []
    known = record.files.items()
    sizes = _at_once(4 * WORKERS, lambda f: _size(folder / f[0], f[1].bytes), known)
    for (name, wanted), size in zip(record.files.items(), sizes, strict=True):
        if isinstance(size, OSError):
            found.append(Damage(name, f"{size.strerror}"))
        elif size != wanted.bytes:
            found.append(Damage(name, f"{size} bytes instead of {wanted.bytes}"))
        elif not fast or size <= SMALL:
            whole.append(name)
    try:
        sums = sum_files(folder, whole, {n: record.files[n].bytes for n in whole})
    except OSError as error:
        absent(Path(error.filename or folder), error, any_other=False)
        return [*found, Damage(str(error.filename), f"{error.strerror}")]
    for name in whole:
        pairs = zip(sums[name].crc32, record.files[name].crc32, strict=True)
        bad = [i * CHUNK for i, (now, then) in enumerate(pairs) if now != then]
        if bad:
            spans = [(b, min(b + CHUNK, sums[name].bytes)) for b in bad]
            where = ", ".join(f"{a}..{b}" for a, b in spans[:3])
            found.append(Damage(name, f"bytes {where} are not what was saved", spans))
    return found


def _size(path: Path, likely: int) -> int | OSError:
    """Returns a file's size, or why there is none. likely: a store does not tell, it compares."""
    try:
        return path.size(likely) if isinstance(path, ObjectPath) else path.stat().st_size
    except OSError as error:
        return absent(path, error, any_other=False)


def damaged(folder: Path, damage: Sequence[Damage], leaves: Sequence[str] = ()) -> DamagedError:
    """Returns the error that says all that is known. leaves: those found to be wrong."""
    if not folder.is_dir():  # by a run that goes on, which keeps its newest steps only
        return DamagedError(
            f"step {folder.name} of {folder.parent} was removed while it was read; {GONE}"
        )
    held = leaves or leaves_in(folder, damage)
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
    found: dict[str, None] = {}
    try:
        for leaf, file, begin, end in stored_values(folder):
            spans = hurt.get(file)
            if spans is not None and (not spans or any(a < end and begin < b for a, b in spans)):
                found[leaf] = None
    except Exception:  # the index itself may be what is damaged; tensorstore raises many kinds
        return list(found)
    return list(found)


def stored_values(folder: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yields (leaf, file, begin, end) for each chunk of the arrays of a step, from OCDBT's index.

    What lies in the index itself (arrays below 1 kB) is not yielded. Raises: what tensorstore does.
    """
    import tensorstore as ts  # here: only damage and tools ask

    base: Any = ts.KvStore.open(kvstore(folder / "state")).result()
    root: Any = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    todo = [root]
    while todo:
        entries: Any = ts.ocdbt.dump(base, todo.pop()).result()["entries"]
        for entry in entries:
            if "location" in entry:
                todo.append(entry["location"])
            elif "indirect_value" in entry:
                # value:<folder>:<file>:<offset>:<length>
                _, home, file, offset, length = entry["indirect_value"].split(":")
                key = entry["key"]
                text = ast.literal_eval(key) if isinstance(key, str) else key
                leaf = text.decode().rpartition("/c")[0]
                begin = int(offset)
                yield leaf, f"state/{home}{file}", begin, begin + int(length)
