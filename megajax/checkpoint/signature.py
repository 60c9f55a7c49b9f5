"""Signed integrity records: who has the key wrote the step, byte for byte.

Checksums and fingerprints protect from accidents; whoever can write where the checkpoints lie can
mend them. With a key file the record carries an HMAC-SHA256 of its text, and SHA-256 sums of all
files of the step besides the checksums. The file holds one key a line, each of at least KEY_BYTES
bytes; the first one signs, all of them verify, so a key is replaced by putting a new line first.
Make one with `openssl rand -hex 32`. Not protected: which of the signed steps is there (an older
one can be put back, or one of another run with the same key). No jax.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from megajax.checkpoint.store import CheckpointError
from megajax.core.errors import UserError
from megajax.core.files import open_regular
from megajax.core.paths import expand

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
        found = [hmac.compare_digest(self._sum(key, text).encode(), said) for key in self._keys]
        return any(found)

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


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Raises CheckpointError for a key file that another user could read or change.

    A group may read what root owns: that is how a service is given a key.
    """
    open_to = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if found.st_uid == 0:
        open_to &= ~stat.S_IRGRP
    if open_to:
        raise CheckpointError(
            f"{path} has the mode {stat.S_IMODE(found.st_mode):04o}: others can read or change the "
            f"key; chmod 600 {path} {FLAG}"
        )
    if found.st_uid not in (0, os.geteuid()):
        raise CheckpointError(
            f"{path} belongs to user {found.st_uid}, who could change the key; it must belong to "
            f"this user or to root {FLAG}"
        )
