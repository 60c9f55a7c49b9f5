"""Token files in Megatron's .bin/.idx format, read in pieces, written as a stream.

x.bin holds the tokens of all documents one after the other; x.idx says where each begins. It is
also our own cache of tokenised text, so everything downstream reads one format.

.idx, little endian: b"MMIDIDX\\0\\0", u64 version 1, u8 dtype code, u64 sequences n, u64 documents
d, n x i32 lengths, n x i64 byte offsets, d x i64 first sequence of each document (d counts one more
than there are documents). Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import os
import struct
import weakref
from pathlib import Path
from types import TracebackType

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip  # Megatron's 6 and 7 are floating-point numbers: no token ids
LONGEST = 2**31 - 1  # tokens of a document
BLOCK = 2**20  # (chosen) tokens of it that are written at a time
MAX_INDEX = 2**36  # (chosen) bytes of an index: five billion documents
_HEADER = struct.Struct("<9sQBQQ")


class TokenFile:
    """Read access to a prefix: prefix.bin and prefix.idx. One sequence is one document here."""

    def __init__(self, prefix: str | Path, vocab: int | None = None):
        """vocab: the vocabulary size of the model; None: ids need only be int32.

        Raises: UserError when the pair is missing, damaged or of another format.
        """
        self.prefix, self.vocab = Path(prefix), vocab
        try:
            self._open(Path(f"{prefix}.idx"))
        except UserError as error:
            raise UserError(f"{error} (--data.source)") from None
        except OSError as error:
            raise UserError(f"cannot read token file {prefix}: {error} (--data.source)") from None

    def _open(self, index: Path) -> None:
        raw = files.read_bytes(index, MAX_INDEX)
        with files.open_regular(f"{self.prefix}.bin") as tokens:
            self._tokens_bytes = files.size_of(tokens)
            # No memory map: what touches one of a file cut short is killed by SIGBUS.
            self._bin = os.dup(tokens.fileno())
            weakref.finalize(self, os.close, self._bin)
        if len(raw) < _HEADER.size or raw[:9] != MAGIC:
            raise UserError(f"{index} is not a Megatron index (it must begin with MMIDIDX)")
        _, version, code, count, documents = _HEADER.unpack_from(raw)
        if version != 1 or code not in DTYPES:
            raise UserError(f"{index}: version {version}, dtype code {code} are not supported")
        if len(raw) != _HEADER.size + 12 * count + 8 * documents:
            raise UserError(f"{index} is damaged: {len(raw)} bytes do not hold {count} sequences")
        self.dtype = np.dtype(DTYPES[code])
        self.lengths = np.frombuffer(raw, np.int32, count, _HEADER.size)
        self.offsets = np.frombuffer(raw, np.int64, count, _HEADER.size + 4 * count)
        self._check_places(index)
        table = np.frombuffer(raw, np.int64, documents, _HEADER.size + 12 * count)
        self._check_documents(index, table)

    def _check_documents(self, index: Path, table: np.ndarray) -> None:
        """Refuses a document table that no writer makes: here a sequence is a document, and where
        the table is wrong the lengths and offsets before it are not to be believed either."""
        count = len(self.lengths)
        if not len(table):  # of a file without documents, or of a writer that keeps none
            return
        wrong = np.flatnonzero((table < 0) | (table > count))
        if len(wrong):
            raise UserError(
                f"{index} is damaged: entry {wrong[0]} of its document table is "
                f"{table[wrong[0]]}, and its sequences are 0 to {count}"
            )
        wrong = np.flatnonzero(table[1:] < table[:-1])
        if len(wrong):
            raise UserError(
                f"{index} is damaged: its document table is out of order: entry {wrong[0] + 1} is "
                f"{table[wrong[0] + 1]}, after {table[wrong[0]]}"
            )
        if table[0] != 0 or table[-1] != count:
            raise UserError(
                f"{index} is damaged: its document table goes from {table[0]} to {table[-1]}; it "
                f"must go from 0 to {count}, the number of sequences"
            )

    def _check_places(self, index: Path) -> None:
        """Refuses documents that are not in the file, and tokens that two documents share."""
        lengths, width = self.lengths.astype(np.int64), self.dtype.itemsize
        wrong = (lengths < 0) | (self.offsets < 0)
        if wrong.any():
            raise UserError(
                f"{index} is damaged: it holds a negative length or offset (document "
                f"{int(np.flatnonzero(wrong)[0])})"
            )
        nbytes = lengths * width  # below 2^34
        wrong = self.offsets > self._tokens_bytes - nbytes  # a sum could overflow
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            end = int(self.offsets[first]) + int(nbytes[first])
            raise UserError(
                f"{self.prefix}.bin is damaged: {self._tokens_bytes} bytes, {end} used by document "
                f"{first} of {index}"
            )
        held = np.flatnonzero(lengths)
        if (self.offsets[held] % width).any():
            raise UserError(f"{index} is damaged: an offset is not a multiple of {width} bytes")
        order = held[np.argsort(self.offsets[held], kind="stable")]
        shared = self.offsets[order[1:]] < self.offsets[order[:-1]] + nbytes[order[:-1]]
        if shared.any():
            first = int(np.flatnonzero(shared)[0])
            raise UserError(
                f"{index} is damaged: documents {order[first]} and {order[first + 1]} share tokens"
            )

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Returns tokens start..stop of a document.

        Raises: UserError when the file cannot be read, or was cut short since it was opened.
        """
        tokens = np.empty(stop - start, self.dtype)
        begin = int(self.offsets[document]) + start * self.dtype.itemsize
        done, buffer = 0, memoryview(tokens.view(np.uint8))
        while done < len(buffer):
            try:
                more = os.preadv(self._bin, [buffer[done:]], begin + done)
            except OSError as error:
                raise UserError(
                    f"cannot read {self.prefix}.bin: {error.strerror} (--data.source)"
                ) from None
            if not more:
                raise UserError(
                    f"{self.prefix}.bin ends at byte {begin + done}, in document {document}, and "
                    f"had {self._tokens_bytes} bytes when it was opened: restore it, then the same "
                    "command goes on (--data.source)"
                )
            done += more
        return tokens

    @property
    def nbytes(self) -> int:
        """Size of the .bin."""
        return self._tokens_bytes

    def check_ids(self, tokens: np.ndarray, document: int, start: int = 0) -> None:
        """Refuses tokens of a document that the vocabulary lacks. start: place of the first.

        Raises: UserError with the first wrong id, its place, and the vocabulary that has it.
        """
        most = (2**31 if self.vocab is None else self.vocab) - 1
        wrong = np.flatnonzero((tokens < 0) | (tokens > most))
        if not len(wrong):
            return
        first, largest = int(wrong[0]), int(tokens.max())
        said = f"{self.prefix}.bin holds token id {int(tokens[first])} (document {document}, token"
        said += f" {start + first})"
        if self.vocab is None or largest <= most:
            raise UserError(
                f"{said}, ids are from 0 to {most}: the file is damaged, or its .idx names a wrong"
                f" width ({self.dtype}) (--data.source)"
            )
        raise UserError(
            f"{said}, model.vocab={self.vocab} has ids 0 to {most}; the smallest vocabulary that "
            f"has the ids seen so far is {largest + 1} (--model.vocab={largest + 1}, --data.source)"
        )


class TokenWriter:
    """Writes a prefix, document by document; the index appears when the writer is closed."""

    def __init__(self, prefix: str | Path, vocab: int):
        """vocab: decides the width; ids must be below it."""
        self.prefix = Path(prefix)
        self.dtype = np.dtype(np.uint16 if vocab <= 2**16 else np.int32)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(f"{prefix}.bin", "wb")
        self._lengths: list[int] = []

    def add(self, *parts: np.ndarray) -> None:
        """Appends one document, the tokens of its parts in their order.

        Raises: UserError for one that is longer than the index can say.
        """
        length = sum(map(len, parts))
        if length > LONGEST:
            raise UserError(
                f"a document has {length:,} tokens, and the index of {self.prefix} holds "
                f"{LONGEST:,} at most; cut the text into several documents (--data.source)"
            )
        for part in parts:
            for start in range(0, len(part), BLOCK):  # a copy of a block, not of a long document
                self._file.write(part[start : start + BLOCK].astype(self.dtype).tobytes())
        self._lengths.append(length)

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return sum(self._lengths)

    def __enter__(self) -> "TokenWriter":
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes the index, unless the block failed."""
        self._file.close()
        if kind is not None:
            return
        lengths = np.array(self._lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        offsets = np.concatenate([[0], ends[:-1]]).astype(np.int64) if len(lengths) else ends
        code = next(c for c, d in DTYPES.items() if np.dtype(d) == self.dtype)
        header = _HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
        Path(f"{self.prefix}.idx").write_bytes(
            header + lengths.tobytes() + offsets.tobytes() + documents.tobytes()
        )
