"""Arrow files (.arrow): what save_to_disk of Hugging Face's datasets writes, and files of pyarrow.

A stream of messages, or the file format, which is such a stream between a magic word and a footer.
The file is mapped, so that what a message claims to hold is bounded by what is there; columns are
checked before a value is read, since an offset may point anywhere. Compressed messages are refused:
they can unfold to any size. Needs pyarrow, an extra.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.files import map_bytes

MAGIC = b"ARROW1\0\0"  # of the file format
DICTIONARY, RECORDS = 2, 3  # (Arrow's Message.fbs) kinds of messages that have a body
VALUES = 2**20  # (chosen) values below one row
SPLITS = "dataset_dict.json"  # of a folder with a folder for each split


def folder_files(folder: Path) -> list[Path]:
    """Returns the files of a folder of save_to_disk, in their order.

    Raises: UserError for one with splits, and for one without such files.
    """
    files = sorted(p for p in folder.glob("*.arrow") if is_data(p))
    if files:
        return files
    splits = sorted(p.name for p in folder.iterdir() if p.is_dir() and folder_has_data(p))
    if (folder / SPLITS).is_file() or splits:
        raise UserError(
            f"data.source={folder} holds the splits {', '.join(splits) or 'none'}; name the folder "
            f"of one, such as {folder / (splits or ['train'])[0]} (--data.source)"
        )
    raise UserError(
        f"data.source={folder} has no .arrow file; give a folder of save_to_disk (--data.source)"
    )


def folder_has_data(folder: Path) -> bool:
    """Tells whether a folder has files as save_to_disk writes them."""
    return any(is_data(p) for p in folder.glob("*.arrow"))


def is_data(file: Path) -> bool:
    """Tells whether a file holds rows: datasets puts what it computed beside them, as cache-*."""
    return not file.name.startswith(("cache-", "indices-"))


class ArrowFile:
    """The batches of one file. path, schema, names: of the columns."""

    def __init__(self, path: Path):
        """Raises: UserError when it is damaged or compressed, or pyarrow is absent."""
        try:
            import pyarrow
            from pyarrow import ipc
        except ImportError:
            raise UserError(
                f"{path} needs the package pyarrow: uv sync --extra parquet; or convert it to "
                "jsonl (--data.source)"
            ) from None
        self.path, self._pyarrow, self._ipc = path, pyarrow, ipc
        try:
            data = map_bytes(path)
        except (OSError, ValueError) as error:
            raise self.damaged(error) from None
        start = len(MAGIC) if data[: len(MAGIC)].tobytes() == MAGIC else 0
        self._data = pyarrow.py_buffer(data).slice(start)
        try:
            self._check_messages()
            self.schema = ipc.open_stream(pyarrow.BufferReader(self._data)).schema
            self.names = list(self.schema.names)  # UnicodeDecodeError, a ValueError
        except (pyarrow.ArrowException, OSError, ValueError, struct.error) as error:
            raise self.damaged(error) from None

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yields record batches of these columns, checked, whose values lie in the file.

        columns: each is in the schema once. Raises: UserError when it is damaged.
        """
        try:
            for batch in self._ipc.open_stream(self._pyarrow.BufferReader(self._data)):
                chosen = batch.select(list(columns))
                chosen.validate(full=True)
                yield chosen
        except (self._pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
            raise self.damaged(error) from None

    def damaged(self, error: Exception) -> UserError:
        """Returns the error of a file that cannot be read."""
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return UserError(f"cannot read {self.path}: {said} (--data.source)")

    def _check_messages(self) -> None:
        reader = self._ipc.MessageReader.open_stream(self._pyarrow.BufferReader(self._data))
        for message in reader:
            if _is_compressed(message.metadata.to_pybytes()):
                raise UserError(
                    f"{self.path} is compressed inside: write it again without (pyarrow: "
                    "IpcWriteOptions(compression=None)), or as parquet (--data.source)"
                )


def _is_compressed(message: bytes) -> bool:
    """Tells whether the body of a message is compressed, of the bytes of its flat buffer.

    (Arrow's Message.fbs) Message: version, header type, header; DictionaryBatch: id, RecordBatch;
    RecordBatch: length, nodes, buffers, compression. Raises: struct.error, ValueError.
    """

    def member(table: int, number: int) -> int | None:
        start = table - struct.unpack_from("<i", message, table)[0]
        if start < 0:
            raise ValueError("a message is damaged")
        if 4 + 2 * number >= struct.unpack_from("<H", message, start)[0]:
            return None
        offset = struct.unpack_from("<H", message, start + 4 + 2 * number)[0]
        return table + offset if offset else None

    def table(place: int | None) -> int:
        if place is None:
            raise ValueError("a message is damaged")
        return place + struct.unpack_from("<I", message, place)[0]

    root = table(0)
    kind = member(root, 1)
    kind = 0 if kind is None else message[kind]
    if kind not in (DICTIONARY, RECORDS):
        return False
    batch = table(member(root, 2))
    if kind == DICTIONARY:
        batch = table(member(batch, 1))
    return member(batch, 3) is not None


def count_values(array: Any) -> int:
    """Returns how many values there are in an array and below it.

    Raises: ValueError for a type whose values may be in a file once and in an array many times.
    """
    from pyarrow import types

    kind = array.type
    size = len(array)
    if types.is_list(kind) or types.is_large_list(kind):
        return size + count_values(array.flatten())
    if types.is_struct(kind):
        return size + sum(map(count_values, array.flatten()))
    plain = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if types.is_primitive(kind) or types.is_null(kind) or any(f(kind) for f in plain):
        return size
    raise ValueError(f"values of the type {kind} are not read")
