"""Whether a step was read back after it was saved: read_back.json, beside the record.

A step counts when it has its name; what lies in storage is compared with the devices' fingerprints
after that (read_back.py). The mark says what was found, so that a later process knows: `wrong` is
empty when all was as it was written. It names the record that it speaks of: a step without a mark,
or with a torn one, or one of another save of the same step, was not read back. No jax.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from megajax.checkpoint.integrity import (
    MARK,
    REMEDY,
    DamagedError,
    Record,
    absent,
    write_file,
)
from megajax.checkpoint.store import ObjectPath, StoreError
from megajax.core.files import parse_json, read_bytes

MAX_MARK = 2**24  # (chosen) bytes
SAID = 5  # (chosen) wrong things that a message names, and a mark holds


def identity(record: Record) -> str:
    """Returns what tells a record from every other one."""
    return hashlib.sha256(record.text().encode()).hexdigest()


def write(folder: Path, record: Record, wrong: Sequence[str]) -> None:
    """Says what reading a step back found. wrong: nothing when it is good. Raises: OSError."""
    text = json.dumps({"record": identity(record), "wrong": list(wrong[:SAID])})
    if isinstance(folder, ObjectPath):
        (folder / MARK).write(text.encode())
    else:
        write_file(folder / MARK, text)


def read(folder: Path, record: Record) -> list[str] | None:
    """Returns what was wrong when a step was read back; None: it was not.

    Raises: UnreadableError, StoreError.
    """
    path = folder / MARK
    try:
        raw = path.read_bytes() if isinstance(path, ObjectPath) else read_bytes(path, MAX_MARK)
        found = parse_json(raw)
        wrong = found["wrong"]
        if not isinstance(wrong, list) or found["record"] != identity(record):
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
