"""Object stores as folders: s3://bucket/prefix and gs://bucket/prefix, through tensorstore.

An ObjectPath is a Path to look through: it joins, lists and reads like one, so what reads the files
of a step need not know where they lie. What would touch a local file system raises TypeError.
Endpoint, region and credentials come from where every tool of these stores takes them:
AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID with
AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's own role; GOOGLE_APPLICATION_CREDENTIALS or
gcloud's login. Errors 429 and 5xx are tried again by tensorstore; nothing waits for ever. No jax.
"""

import ast
import errno
import fnmatch
import functools
import json
import math
import os
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError

DRIVERS = {"s3:": "s3", "gs:": "gcs"}
# Six tries again within about 25 s (chosen: a server's restart, not its end).
RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}
PATIENCE_S = 120.0  # for one answer, tries included (chosen: 128 MiB at 1 MB/s)
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
}
NO_BUCKET = ("NoSuchBucket", "bucket does not exist")
INDEX_CACHE = 10**8  # bytes of OCDBT's index that are kept, or every chunk would read it again
ALIGNMENT = 64  # bytes: memory that begins so needs no copy to become an array on the CPU
ADDRESS = {"s3": "AWS_ENDPOINT_URL and AWS_REGION", "gcs": "the network and its proxy"}


class CheckpointError(UserError):
    """A step that cannot be saved, found or restored."""


class SaveError(CheckpointError):
    """A save did not reach storage; earlier steps are as they were.

    Storage may be back when the command is started again, so a launcher should try.
    """

    exit_code = 75


def no_step(
    folder: Any, step: int | None, steps: Sequence[int], bad: Collection[int] = ()
) -> CheckpointError:
    """Returns the error of a step, None: of any, that a folder has not. bad: damaged steps."""
    if bad:
        return CheckpointError(f"{folder} has no good checkpoint; damaged: {sorted(bad)}")
    if not steps:
        return CheckpointError(f"{folder} has no checkpoint (--run_dir)")
    return CheckpointError(f"{folder} has no step {step}; it has {list(steps)} (--step)")


class StoreError(CheckpointError):
    """An object store that does not do what it is asked; it says nothing of what is stored."""


class ObjectPath(Path):
    """An object, or the prefix of some. Raises, wherever it asks the store: StoreError."""

    def __str__(self) -> str:
        return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not a path of this machine")

    def spec(self) -> dict[str, Any]:
        """Returns tensorstore's description of this prefix. Raises: CheckpointError: no bucket."""
        if len(self.parts) < 2:
            raise CheckpointError(f"{self} names no bucket; nearest: {self}BUCKET/PREFIX")
        scheme, bucket, *keys = self.parts
        driver = DRIVERS[scheme]
        place = {"driver": driver, "bucket": bucket, "path": "".join(f"{k}/" for k in keys)}
        context: dict[str, Any] = {f"{driver}_request_retries": RETRIES}
        return place | {"context": context} | (_s3_options() if driver == "s3" else {})

    def read_bytes(self) -> bytes:
        """Returns the object. Raises: FileNotFoundError."""
        return self._read(None)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Returns the object as text. Raises: FileNotFoundError."""
        return self._read(None).decode(encoding or "utf-8", errors or "strict")

    def read_range(self, begin: int, length: int) -> bytes:
        """Returns bytes begin..begin+length, which must be there. Raises: FileNotFoundError."""
        return self._read(slice(begin, begin + length))

    def size(self, likely: int) -> int:
        """Returns the object's bytes; costs one of them if there are `likely`, else all.

        Raises: FileNotFoundError.
        """
        if likely:
            try:
                if len(self._read(slice(likely - 1, None), short=True)) == 1:
                    return likely
            except _ShortError:
                pass
        return len(self.read_bytes())

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Tells whether there is such an object."""
        try:
            self._read(slice(0, 0))
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Tells whether there are objects under this prefix."""
        return bool(self.names())

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all objects under this one that begin so, relative, sorted."""
        import tensorstore as ts

        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        keys = ts.KvStore.KeyRange(prefix, end)
        return sorted(k.decode() for k in self._wait(self._open().list(keys)))

    def glob(self, pattern: str, *, case_sensitive: bool | None = None) -> Generator["ObjectPath"]:
        """Yields the objects under this one whose relative name matches; * stands for / too."""
        names = self.names(pattern.partition("*")[0])
        yield from (self / name for name in names if fnmatch.fnmatchcase(name, pattern))

    def write(self, content: bytes) -> None:
        """Stores the object: all of it or, when this raises, the one before or all of it."""
        self._wait(self.parent._open().write(self.name, content))

    def read_version(self) -> tuple[bytes, Any]:
        """Returns the object (b"" when there is none) and what `swap` knows this version by."""
        result = self._wait(self.parent._open().read(self.name))
        return result.value or b"", result.stamp.generation

    def swap(self, content: bytes, version: Any) -> bool:
        """Stores the object if it is still of this version; tells whether it was.

        A store that ignores conditions stores it in any case. Raises: StoreError, also where a
        store refuses conditions.
        """
        try:
            stamp = self._wait(self.parent._open().write(self.name, content, if_equal=version))
        except StoreError as error:
            if any(words in str(error) for words in ("Not Implemented", "NotImplemented", "501")):
                raise StoreError(
                    f"{self}: this store takes no conditional writes, which keep two attempts of a "
                    "supervised job from saving at one time; use another store or a file system "
                    "(--checkpoint.dir)"
                ) from error
            raise
        return bool(stamp.generation)  # empty: the condition did not hold

    def delete(self) -> None:
        """Removes the object, if there is one."""
        self._wait(self.parent._open().write(self.name, None))

    def _read(self, span: slice | None, short: bool = False) -> bytes:
        result = self._wait(self.parent._open().read(self.name, byte_range=span), short)
        if result.state == "missing":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return result.value

    def _open(self) -> Any:
        return _open(json.dumps(self.spec()))

    def _wait(self, future: Any, short: bool = False) -> Any:
        try:
            return future.result(timeout=PATIENCE_S)
        except Exception as error:  # tensorstore raises many kinds
            if short and str(error).startswith("OUT_OF_RANGE"):
                raise _ShortError from None
            why = explained(self, error)
            known = isinstance(why, UserError)
            raise (why if known else StoreError(f"{self}: {str(error)[:300]}")) from error


class _ShortError(Exception):
    """Bytes were asked for that an object does not have."""


def is_address(path: str | Path) -> bool:
    """Tells an address of an object store from a local path."""
    return isinstance(path, ObjectPath) or str(path).startswith(tuple(f"{s}//" for s in DRIVERS))


def kvstore(folder: Path) -> dict[str, Any]:
    """Returns what tensorstore opens as a folder, local or not.

    A URL would give another folder where the name holds %, #, ? or a backslash.
    """
    if isinstance(folder, ObjectPath):
        return folder.spec()
    return {"driver": "file", "path": f"{os.path.realpath(folder)}/"}  # which refuses ".."


def explained(path: Path, error: Exception) -> Exception:
    """Returns a StoreError if the store failed, rather than what is stored; else the error."""
    if not isinstance(path, ObjectPath) or isinstance(error, UserError):
        return error
    code, _, detail = str(error).partition(":")
    reason = detail.strip().partition(" [")[0][:200]
    driver = DRIVERS[path.parts[0]]
    if isinstance(error, TimeoutError):
        return StoreError(f"{path}: no answer within {PATIENCE_S:g} s; see to {ADDRESS[driver]}")
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return StoreError(f"{path}: access denied ({reason}); set {CREDENTIALS[driver]}")
    if code == "NOT_FOUND" and any(words in detail for words in NO_BUCKET):
        return StoreError(f"{path}: there is no bucket {path.parts[1]}; make it, or name another")
    if code in ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"):
        return StoreError(f"{path}: no answer ({reason}); see to {ADDRESS[driver]}")
    return error


def _s3_options() -> dict[str, Any]:
    env = os.environ
    options: dict[str, Any] = {
        "endpoint": env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"),
        "aws_region": env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"),
        # Without it tensorstore looks for files first, and says in ten lines that there are none.
        "aws_credentials": {"type": "environment"} if env.get("AWS_ACCESS_KEY_ID") else None,
    }
    return {name: value for name, value in options.items() if value}


@functools.cache
def _open(spec: str) -> Any:
    import tensorstore as ts  # here: half a second, which local folders need not spend

    try:
        return ts.KvStore.open(json.loads(spec)).result(timeout=PATIENCE_S)
    except Exception as error:
        place = json.loads(spec)
        scheme = {driver: scheme for scheme, driver in DRIVERS.items()}[place["driver"]]
        where = ObjectPath(f"{scheme}//{place['bucket']}/{place['path']}")
        raise explained(where, error) from error


# ---- stored index
#
# Where the arrays of a step lie in its files, as OCDBT's own index says. No jax.


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


def index_context() -> Any:
    """Returns what `open_leaf` shares among the leaves of a step, a tensorstore.Context."""
    import tensorstore as ts

    return ts.Context({"cache_pool#index": {"total_bytes_limit": INDEX_CACHE}})


def open_leaf(folder: Path, name: str, context: Any) -> Any:
    """Returns the future of a stored leaf's array."""
    import tensorstore as ts

    source = {
        "driver": "ocdbt",
        "base": kvstore(folder / "state"),
        "path": f"{name}/",
        "cache_pool": "cache_pool#index",
    }
    return ts.open({"driver": "zarr3", "kvstore": source}, open=True, read=True, context=context)


def buffer(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns fresh memory that begins at a multiple of ALIGNMENT."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + nbytes].view(dtype).reshape(shape)
