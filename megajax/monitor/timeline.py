"""What a run did with its time: all ranks in one picture, and the share of time that trained.

The pictures are a merged timeline, a heat map, and a grid that shows which rank is silent
(MegaScale section 5). They are drawn from the spans that ranks left in shared memory, those of dead
ranks included. Moments are each host's own CLOCK_MONOTONIC; `offsets` map them to one clock. Below:
the effective training time ratio (ETTR), and the report of a supervised run. No jax import;
matplotlib is imported only when a picture is drawn.

Legend: the grid is {axis: devices}, outermost first; ranks hold equal runs of it, in order.
"""

import html
import math
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core import files
from megajax.core.errors import UserError
from megajax.monitor.heartbeat import CODES, Span
from megajax.monitor.records import read_jsonl

Spans = Mapping[int, Sequence[Span]]
OWN = ("data", "prepare")
LATEST = 1e12  # (chosen) seconds of a clock; what is beyond is no moment
MAX_DEVICES = 2**20  # (chosen) of a grid
FRAME = ";outline:3px solid #00c"  # of a rank that a detector has named
REDDEST = 0.2  # (chosen) of a step more than the usual has the full colour


def spans_of(told: Mapping[str, Sequence[Any]]) -> dict[int, list[Span]]:
    """Returns each rank's sections from {rank: [[section, step, begin, end]]}.

    What is no section is left out: a process that is sick may have written anything into its memory
    of them. So is a rank that has none.
    """
    sections = {}
    for rank, rows in told.items():
        if re.fullmatch("[0-9]{1,9}", str(rank)) and isinstance(rows, list | tuple):
            if spans := [Span(*row) for row in rows if _is_span(row)]:
                sections[int(rank)] = spans
    return sections


def _is_span(row: Any) -> bool:
    match row:
        case [str(section), int(step), int() | float() as begin, int() | float() as end]:
            # A NaN is not between the two.
            return section in CODES and step < 2**63 and -LATEST < begin <= end < LATEST
    return False


def perfetto(
    spans: Spans, hosts: Mapping[int, str], offsets: Mapping[str, float]
) -> dict[str, Any]:
    """Returns Chrome trace events for Perfetto: a process for each host, a thread for each rank.

    In each step an arrow leads from the rank that launched it last to each other rank, which waited
    for it. offsets: {host: its clock minus that of the picture, in seconds}.
    """
    numbers = {host: i for i, host in enumerate(sorted(set(hosts.values())))}
    places = {rank: {"pid": numbers[hosts[rank]], "tid": rank} for rank in spans}
    moved: dict[int, list[Span]] = {}
    for rank, sections in spans.items():
        offset = offsets.get(hosts[rank], 0.0)
        moved[rank] = [Span(s.section, s.step, s.begin - offset, s.end - offset) for s in sections]
    zero = min((s.begin for sections in moved.values() for s in sections), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": i, "name": "process_name", "args": {"name": host}}
        for host, i in numbers.items()
    ]
    for rank, sections in moved.items():
        name = {"ph": "M", **places[rank], "name": "thread_name", "args": {"name": f"rank {rank}"}}
        events.append(name)
        events += [
            {
                "ph": "X",
                **places[rank],
                "name": s.section,
                "cat": "section",
                "ts": (s.begin - zero) * 1e6,
                "dur": (s.end - s.begin) * 1e6,
                "args": {"step": s.step},
            }
            for s in sections
        ]
    for step, launches in sorted(_launches(moved).items()):
        last = max(launches, key=lambda r: launches[r].begin)
        for rank, span in launches.items():
            if rank != last:
                arrow = {"name": "waited for", "cat": "waits", "id": f"{step}.{rank}"}
                at, to = launches[last].begin, max(span.begin, span.end - 1e-9)
                begin = {"ph": "s", **places[last], "ts": (at - zero) * 1e6}
                end = {"ph": "f", "bp": "e", **places[rank], "ts": (to - zero) * 1e6}
                events += [arrow | begin, arrow | end]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _launches(spans: Spans) -> dict[int, dict[int, Span]]:
    """Returns {step: {rank: its launch}} of steps that more than one rank has launched."""
    launches: dict[int, dict[int, Span]] = {}
    for rank, sections in spans.items():
        for s in sections:
            if s.section == "launch":
                launches.setdefault(s.step, {})[rank] = s
    return {step: ranks for step, ranks in launches.items() if len(ranks) > 1}


def own_share(spans: Spans) -> dict[int, float]:
    """Returns each rank's own work, in usual steps, more than the usual rank's: 0.12 is +12 %."""
    work_s: dict[int, float] = {}
    steps: list[float] = []
    for rank, sections in spans.items():
        sums: dict[int, float] = {}
        for s in sections:
            if s.section in OWN:
                sums[s.step] = sums.get(s.step, 0.0) + s.end - s.begin
        work_s[rank] = statistics.median(sums.values()) if sums else 0.0
        begins = [s.begin for s in sections if s.section == "data"]
        steps += [b - a for a, b in zip(begins, begins[1:], strict=False)]
    usual = statistics.median_low(work_s.values()) if work_s else 0.0
    step_s = statistics.median(steps) if steps else math.inf
    if step_s <= 0:  # moments that no clock has
        step_s = math.inf
    return {rank: (o - usual) / step_s for rank, o in work_s.items()}


# ---- pictures on the grid of devices


def parse_grid(text: str | None, ranks: int) -> dict[str, int]:
    """Returns the grid of 'pipe=2,data=4,tensor=8'; {'rank': ranks} for None.

    Raises: UserError when it is none, or ranks cannot hold equal parts of it.
    """
    if text is None:
        return {"rank": ranks}
    try:
        grid = {axis: int(size) for axis, size in (w.split("=") for w in text.split(","))}
    except ValueError:
        grid = {}
    sizes = list(grid.values())
    if not grid or min(sizes) < 1 or (all_ := math.prod(sizes)) % ranks or all_ > MAX_DEVICES:
        raise UserError(
            f"grid={text:.200} must be axis=size,... whose product is a multiple of the {ranks} "
            f"ranks and at most {MAX_DEVICES}, e.g. data={ranks},tensor=8 (--grid)"
        )
    return grid


def _rows(grid: Mapping[str, int], ranks: int) -> Iterator[tuple[str, list[int]]]:
    """Yields (name of a row, the rank of each of its devices): the last axis lies in the row."""
    *outer, last = grid
    wide, each = grid[last], math.prod(grid.values()) // ranks
    for row in range(math.prod(grid.values()) // wide):
        number, words = row, []
        for axis in reversed(outer):
            number, at = divmod(number, grid[axis])
            words.append(f"{axis} {at}")
        yield " ".join(reversed(words)), [(row * wide + i) // each for i in range(wide)]


def silent(places: Mapping[int, tuple[int, str]], grid: Mapping[str, int]) -> str:
    """Returns who is furthest behind, as text over the grid: '#' is silent, '.' waits for it.

    places: {rank: (step, section)}. When a collective hangs, the ranks that reached it say so, and
    the one that did not reach it is silent.
    """
    order = {rank: (step, CODES[section]) for rank, (step, section) in places.items()}
    behind = {rank for rank, at in order.items() if at == min(order.values())}
    step, section = places[min(behind)]
    names = ", ".join(map(str, sorted(behind)[:8])) + (" ..." if len(behind) > 8 else "")
    rows = list(_rows(grid, len(places)))
    wide = max(len(name) for name, _ in rows)
    lines = [f"furthest behind, in {section!r} of step {step}: rank {names}"]
    lines.append(f"rows: {' x '.join([*grid][:-1]) or 'all'}; along a row: {[*grid][-1]}")
    for name, ranks in rows:
        lines.append(f"{name:{wide}} " + "".join("#" if r in behind else "." for r in ranks))
    return "\n".join(lines) + "\n"


def heat_html(
    shares: Mapping[int, float], grid: Mapping[str, int], named: Mapping[int, str] | None = None
) -> str:
    """Returns a page with the heat map of `own_share`; each cell shows its rank and figure.

    named: {rank: what detectors said of it}; such cells have a frame, and the page lists the
    sentences.
    """
    named = named or {}
    worst = max(shares, key=lambda r: shares[r])
    title = f"rank {worst} does {100 * shares[worst]:.1f} % of a step more than the usual rank"
    lines = [
        f"<!doctype html><meta charset=utf-8><title>{title}</title><h3>{title}</h3>",
        f"<p>own work before each launch; along a row: {html.escape([*grid][-1])}</p><table>",
    ]
    for name, ranks in _rows(grid, len(shares)):
        cells = (
            f'<td style="background:{_colour(shares[r])}{FRAME * (r in named)}" title="rank {r}: '
            f'{100 * shares[r]:+.1f} % {html.escape(named.get(r, ""))}">&nbsp;&nbsp;</td>'
            for r in ranks
        )
        lines.append(f"<tr><th>{html.escape(name)}</th>{''.join(cells)}</tr>")
    said = [f"<p>{html.escape(text)}" for text in dict.fromkeys(named.values())]
    return "\n".join([*lines, "</table>", *said, ""])


def _colour(share: float) -> str:
    pale = round(255 * (1 - min(max(share / REDDEST, 0.0), 1.0)))
    return f"#ff{pale:02x}{pale:02x}"


def draw_heat(shares: Mapping[int, float], grid: Mapping[str, int], path: Path) -> None:
    """Draws the heat map as PNG or SVG, by the suffix of the path."""
    from matplotlib.figure import Figure

    rows = list(_rows(grid, len(shares)))
    figure = Figure(figsize=(8, 1.4 + 0.25 * len(rows)), dpi=110, layout="constrained")
    axes = figure.subplots()
    values = [[100 * shares[r] for r in ranks] for _, ranks in rows]
    image = axes.imshow(values, cmap="Reds", vmin=0, vmax=100 * REDDEST, aspect="auto")
    axes.set_yticks(range(len(rows)), [name or "all" for name, _ in rows], fontsize=8)
    axes.set_xlabel([*grid][-1])
    worst = max(shares, key=lambda r: shares[r])
    axes.set_title(f"rank {worst}: {100 * shares[worst]:+.1f} % of a step of own work", loc="left")
    figure.colorbar(image, label="% of a step more than the usual rank")
    figure.savefig(path)


# ---- effective training time ratio (ETTR): what part of the time went into steps that count
#
# By ByteCheckpoint's formula, from the interval between saves, and by measurement, from what a
# supervised run left behind.


def formula(interval: int, step_s: float, save_s: float, load_s: float) -> float:
    """Returns N T / (N T + T_wasted), T_wasted = (N T + T_save) / 2 + T_load.

    This is the ETTR of an interval between two saves in which one fault occurs at a random moment.
    interval: N, steps between saves. step_s: T, seconds of a step. save_s: seconds until a save is
    stored. load_s: seconds from the fault to the next step.
    """
    useful = interval * step_s
    return useful / (useful + (useful + save_s) / 2 + load_s)


def elapsed(events: Sequence[Mapping[str, Any]]) -> float:
    """Returns the seconds of all drivers that wrote these events, each by its even clock.

    A clock that is set during the run changes "time", and not "clock"; older files lack the latter.
    """
    if "clock" not in events[-1]:
        return events[-1]["time"] - events[0]["time"]
    clocks = [e.get("clock", 0.0) for e in events]
    ends = [a for a, b in zip(clocks, clocks[1:], strict=False) if b < a]  # another driver began
    return sum(ends) + clocks[-1]


def measured(events: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> dict:
    """Returns where the time of a supervised run went, in seconds, and the ratio.

    events: rows of events.jsonl. rows: rows of metrics.jsonl; a step that was repeated has several.
    In the result, training_s is the time of steps that count, redone_s that of steps that a fault
    undid, and down_s all other time: start, compilation, saves, evaluation, hangs, checks.
    """
    events = list(events)
    total = elapsed(events)
    last: dict[int, float] = {}
    redone = 0.0
    for row in rows:
        if "step_time_s" in row:
            redone += last.get(row["step"], 0.0)
            last[row["step"]] = max(row["step_time_s"] - row.get("time_compile_s", 0.0), 0.0)
    training = sum(last.values())
    return {
        "total_s": total,
        "training_s": training,
        "redone_s": redone,
        "down_s": total - training - redone,
        "faults": sum(e["event"] == "fault" for e in events),
        "ettr": training / total if total > 0 else 0.0,
    }


# ---- what a supervised run left behind, read again for a report: events, rows, spans
#
# Files may be damaged or of another version: lines and sections that are not as expected are left
# out.


MAX_SPANS = 2**30  # (chosen) bytes of a spans.json: 16,384 ranks
LARGEST = 1e12  # (chosen) seconds; what is beyond is no time


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < LARGEST  # False for NaN


def _has_times(row: Mapping[str, Any], needed: str, optional: str) -> bool:
    return _is_time(row.get(needed)) and _is_time(row.get(optional, 0.0))


def figures(out: Path, run_dir: Path) -> dict[str, float]:
    """Returns where the time of a run went, as `measured` does. out: folder of its driver.

    Raises: UserError when no driver wrote there.
    """
    events = [
        e
        for e in read_jsonl(out / "events.jsonl")
        if isinstance(e.get("event"), str) and _has_times(e, "time", "clock")
    ]
    if len(events) < 2:
        raise UserError(f"{out} has no supervised run (--out)")
    rows = (
        r
        for r in read_jsonl(run_dir / "metrics.jsonl")
        if isinstance(r.get("step"), int) and _has_times(r, "step_time_s", "time_compile_s")
    )
    return measured(events, rows)


def shares(out: Path) -> tuple[Path, dict[int, float], dict[str, int]] | None:
    """Returns (the newest spans.json of a run, {rank: excess}, {axis of the grid: devices}).

    The excess of a rank is how much longer its own work of a step takes than the usual rank's, in
    shares of a usual step: 0.12 is 12 % (`own_share`). If the rule `slow` measured a larger excess
    during the run, that one counts. out: the folder of a supervised run.

    None: no attempt left a spans.json. Raises: UserError if the file cannot be read or has no
    spans.
    """
    newest = max(out.glob("attempt*/spans.json"), key=os.path.getmtime, default=None)
    if newest is None:
        return None
    saved = files.read_object(newest, MAX_SPANS, "out")
    told, grid = saved.get("spans"), saved.get("grid")
    spans = spans_of(told if isinstance(told, dict) else {})
    if not spans:
        raise UserError(f"{newest} holds no sections of ranks (--out)")
    axes = parse_grid(grid if isinstance(grid, str) else None, len(spans))
    shares, more = own_share(spans), saved.get("shares")
    for rank, x in (more if isinstance(more, dict) else {}).items():  # as the rule `slow` saw it
        if rank.isdecimal() and int(rank) in shares and _is_time(x):
            shares[int(rank)] = max(shares[int(rank)], x)
    return newest, shares, axes
