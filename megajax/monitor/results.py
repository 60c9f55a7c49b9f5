"""Results that documents quote: JSON with device, date, commit and layer.

layer says how far a figure can be trusted: 'emulated' (CPU devices), 'interpreted', 'compiled for
H100', 'measured on H200', 'simulated'.

Every script that makes results has the flag --out (`out_option`). It writes into runs/ by default:
experiments/results holds what documents quote, and only who names that folder changes it.
"""

import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from megajax.core.config import option
from megajax.core.errors import UserError
from megajax.core.files import check_writable, expand, json_text, write_whole

Row = Mapping[str, Any]


def commit() -> str:
    """Returns the short commit of the source, '+' if it was changed, '' outside a checkout."""
    if not (Path(__file__).parents[2] / ".git").exists():
        return ""  # installed, perhaps below a repository of the user's
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def out_option(name: str) -> Any:
    """Returns the field `out` of a script's configuration: runs/NAME."""
    return option(
        f"runs/{name}", "folder for the results; the documents quote those in experiments/results"
    )


def writable_folder(path: str, flag: str = "out") -> Path:
    """Makes a folder that a flag names; called before the work begins.

    Raises: UserError when nothing can be written there.
    """
    folder = expand(path, flag)
    check_writable(folder, flag, make=True)
    return folder


def facts(device: str, layer: str) -> dict[str, str]:
    """Returns the facts that every result states beside its figures."""
    return {
        "device": device,
        "layer": layer,
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def write(path: Path, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes {**about, "rows": [...]}; called after each row, so that a cut-off run counts.

    A run that is cut off while it writes leaves the rows before. Inf and NaN become null.
    Raises: UserError when the disk does not take it.
    """
    text = json_text({**about, "rows": list(rows)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror} (--out)") from None


def columns(rows: Sequence[Row], members: Mapping[str, str]) -> str:
    """Returns rows as text in columns for a terminal. members: heading -> member of a row."""
    lines = [list(members), *([_cell(row.get(key)) for key in members.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
