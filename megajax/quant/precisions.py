"""The precisions of products, and the file that says which products have which, by kind of device.

The file belongs to a job on unlike devices (QSync, arXiv 2407.02327): systems/qsync chooses its
rows, and training/precision.py computes by them. No jax.
"""

from os import PathLike
from pathlib import Path
from typing import Self

from megajax.core import files
from megajax.core.errors import UserError, unwritable

# From the narrowest to the widest: an operation without a choice takes its widest input's.
PRECISIONS = ("int8", "fp8", "float16", "bfloat16", "float32")
RANK = {precision: rank for rank, precision in enumerate(PRECISIONS)}
FORMAT = "megajax precisions 1"
KIND = 100  # (chosen) characters of a kind's name
MOST = 16 * 2**20  # (chosen) bytes of a file: 100,000 nodes and more


class Precisions(dict[str, dict[str, str]]):
    """{kind: {node: precision}}, of the nodes that have a choice.

    gap: an exact allocation's sum of omega may be so much above the least one, as a fraction of the
    sum; 0: it is the least. Infinite: nothing is proven, as of a greedy allocation, of a file, and
    where the time ended before the shortest step was known.
    """

    gap = float("inf")

    def save(self, path: str | PathLike[str]) -> None:
        """Replaces a JSON file. Raises: UserError when it cannot be written."""
        try:
            files.write_whole(Path(path), files.json_text({"format": FORMAT, "precisions": self}))
        except OSError as error:
            raise unwritable(f"cannot write {path}: {error.strerror}", error) from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Returns what `save` wrote. Raises: UserError naming a file that is none, or damaged."""
        value = files.read_object(Path(path), MOST)
        if value.get("format") != FORMAT:
            raise UserError(
                f"{path} is no file of precisions: its format is {value.get('format')!r:.60}, not "
                f"{FORMAT!r}"
            )
        rows = value.get("precisions")
        if set(value) != {"format", "precisions"} or not isinstance(rows, dict) or not rows:
            raise UserError(f"{path} is damaged: it must hold 'precisions' of at least one kind")
        for kind, row in rows.items():
            if not (kind.isprintable() and "," not in kind and 0 < len(kind) <= KIND):
                raise UserError(
                    f"{path} is damaged: kind {kind!r:.60} must have 1 to {KIND} printable "
                    "characters and no comma (--kind)"
                )
            if not isinstance(row, dict):
                raise UserError(f"{path} is damaged: kind {kind!r:.60} has {row!r:.60}")
            for name, precision in row.items():
                if precision not in PRECISIONS:
                    raise UserError(
                        f"{path} is damaged: {name!r:.60} of kind {kind!r:.60} has "
                        f"{precision!r:.60}; it must be one of {', '.join(PRECISIONS)}"
                    )
        return cls(rows)
