"""What rounding adds to the errors of each product of a model, measured, and the file of it."""

import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from megajax.core import files
from megajax.core.errors import UserError, did_you_mean, unwritable
from megajax.systems.qsync.graph import PRECISIONS

# ---- the file


FORMAT = "megajax omega 1"
MOST = 16 * 2**20  # (chosen) bytes of a file: 50,000 products and more
Errors = Mapping[str, Mapping[str, float]]  # {product: {precision: omega}}


def save(path: str | PathLike[str], errors: Errors, facts: Mapping[str, str]) -> None:
    """Replaces a JSON file. facts: how the errors were measured; nothing reads them.

    Raises: UserError when it cannot be written.
    """
    text = files.json_text({"format": FORMAT, "facts": facts, "omega": errors})
    try:
        files.write_whole(Path(path), text)
    except OSError as error:
        raise unwritable(f"cannot write {path}: {error.strerror}", error) from None


def load(path: str | PathLike[str]) -> dict[str, dict[str, float]]:
    """Returns the errors that `save` wrote. Raises: UserError naming a file that is none, or
    damaged."""
    value = files.read_object(Path(path), MOST)
    if value.get("format") != FORMAT:
        raise UserError(
            f"{path} is no profile of products: its format is {value.get('format')!r:.60}, not "
            f"{FORMAT!r} (--omega)"
        )
    rows = value.get("omega")
    if not isinstance(rows, dict) or not rows:
        raise UserError(f"{path} is damaged: it must hold 'omega' of at least one product")
    for name, row in rows.items():
        if not isinstance(row, dict):
            raise UserError(f"{path} is damaged: {name!r:.60} has {row!r:.60}")
        for precision, omega in row.items():
            if precision not in PRECISIONS:
                raise UserError(
                    f"{path} is damaged: {name!r:.60} has {precision!r:.60}, which is none of "
                    f"{', '.join(PRECISIONS)}.{did_you_mean(precision, PRECISIONS)}"
                )
            is_number = type(omega) in (int, float) and math.isfinite(omega) and omega >= 0
            if not is_number:
                raise UserError(
                    f"{path} is damaged: {name!r:.60} in {precision} has {omega!r:.60}; it must be "
                    "a finite number of at least 0"
                )
    return rows
