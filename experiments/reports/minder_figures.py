"""Figures of the evaluation of experiments/minder.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes PATH.svg and .png."""
