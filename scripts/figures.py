"""Draws the figures that documents show from the results that documents quote.

    uv run scripts/figures.py            # experiments/results/*.json -> .svg and .png beside them
    uv run scripts/figures.py FOLDER     # those of another folder, e.g. of an experiment's --out

The script draws the figures of flux, comet, bytetransformer, tilewise, sdp4bit, serving, minder,
bytecheckpoint and cdmpp_replay; it trains, simulates and measures nothing. The figures of chaos and
schedules are drawn by their experiments alone.
"""

import megajax.core.interrupted  # noqa: F401

import sys
from collections.abc import Callable
from pathlib import Path

from experiments.reports import bytecheckpoint as bytecheckpoint_report
from experiments.reports import bytetransformer as bytetransformer_report
from experiments.reports import cdmpp_replay
from experiments.reports import minder as minder_report
from experiments.reports import overlap as overlap_report
from experiments.reports import sdp4bit as sdp4bit_report
from experiments.reports import serving as serving_report
from experiments.reports import tilewise as tilewise_report
from megajax.core import config, files
from megajax.core.errors import UserError
from megajax.core.files import expand

RESULTS = Path(__file__).parent.parent / "experiments" / "results"

MAX_RESULTS = 2**28  # (chosen) bytes of a result


def flux(result: dict, path: Path) -> None:
    """Efficiency by rows."""
    overlap_report.draw_ops(result["rows"], result["machine"]["name"], path)


def comet(result: dict, path: Path) -> None:
    """Speed-up by layout."""
    overlap_report.draw_layers(result["rows"], result["machine"]["name"], path)


def bytetransformer(result: dict, path: Path) -> None:
    """Counted work."""
    bytetransformer_report.draw_counts(result["rows"], path)


def tilewise(result: dict, path: Path) -> None:
    """Losses by sparsity, and speed-ups beside losses."""
    parts = {
        part: [r for r in result["rows"] if r["part"] == part]
        for part in ("quality", "claim", "price")
    }
    tilewise_report.draw_quality(parts["quality"], parts["claim"], path)
    tilewise_report.draw_price(parts["price"], path.with_name("tilewise_price"))


def sdp4bit(result: dict, path: Path) -> None:
    """Losses, and gaps to the float32 exchange."""
    sdp4bit_report.draw(result["rows"], path)


def serving(result: dict, path: Path) -> None:
    """Tokens a second by mode, and latency by load."""
    serving_report.draw(result["rows"], path)


def minder(result: dict, path: Path) -> None:
    """F1 by size, recall by kind, noise, delays."""
    minder_report.draw(result["rows"], path)


def bytecheckpoint(result: dict, path: Path) -> None:
    """Seconds of saves and loads."""
    rows = [row for row in result["rows"] if row["what"] in bytecheckpoint_report.TITLES]
    bytecheckpoint_report.draw(rows, path, result["megabytes"])


def replay(result: dict, path: Path) -> None:
    """Predicted beside measured train steps."""
    cdmpp_replay.draw(result["rows"], path)


FIGURES: dict[str, Callable[[dict, Path], None]] = {
    "flux_simulated": flux,
    "comet_simulated": comet,
    "bytetransformer_cpu": bytetransformer,
    "tilewise": tilewise,
    "sdp4bit": sdp4bit,
    "serving": serving,
    "minder": minder,
    "bytecheckpoint": bytecheckpoint,
    "cdmpp_replay": replay,
}


def main(of: str | None = None) -> int:
    """Draws what the folder has results of."""
    folder = RESULTS if of is None else expand(of)
    there = [name for name in FIGURES if (folder / f"{name}.json").exists()]
    if not there:
        raise UserError(f"{folder} holds none of {', '.join(f'{n}.json' for n in FIGURES)}")
    for name in there:
        path = folder / f"{name}.json"
        result = files.read_object(path, MAX_RESULTS)
        try:
            FIGURES[name](result, folder / name)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is no result that can be drawn: {error!r:.200}") from None
        except OSError as error:
            raise UserError(f"cannot write into {folder}: {error.strerror}") from None
        print(f"{folder / name}.svg and .png")
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main, optional=1))
