"""The rows of experiments/results/minder.json, from what detectors said of the cases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reports import minder_counts as counts
from experiments.reports.minder_rivals import ablated
from experiments.reports.minder_rivals.rivals import RIVALS
from experiments.reports.minder_runs import OURS

Row = dict[str, Any]


def rows(found: Sequence[Mapping], names: Sequence[str], seed: int = 0) -> Iterator[Row]:
    """Yields the rows. found: of minder_runs.found; only cases that all detectors have seen count
    in a comparison."""
    judged = [c for c in found if c["mix"]]
    whole = [c for c in judged if all(n in c["said"] for n in names)]
    yield from _overall(whole, names, seed)
    for part, of in (("size", "size"), ("noise", "noise"), ("mix", "mix")):
        for value in dict.fromkeys(c[of] for c in sorted(whole, key=lambda c: (c["size"], c[of]))):
            mine = [c for c in whole if c[of] == value]
            for row in _overall(mine, names, seed):
                yield row | {"part": part, of: value}
    for name in names:
        yield from _kinds(whole, name)
        found_s = [d for _, d in _named(whole, name) if d is not None]
        faults = sum(len(c["faults"]) for c in whole)
        yield {"part": "delays", "detector": name, "faults": faults,
               "seconds": sorted(round(d) for d in found_s)}  # fmt: skip
    healthy = [c for c in found if not c["mix"]]
    for name in names:
        yield from _alarms(healthy, name)
        yield from _costs(found, name)


def what(name: str) -> str:
    """Returns a line about a detector."""
    if name in ablated.VARIANTS:
        return ablated.VARIANTS[name].what
    return RIVALS[name].what if name in RIVALS else "the whole detector"


def _triples(cases: Sequence[Mapping], name: str) -> np.ndarray:
    return np.array([counts.triple(c, c["said"][name]) for c in cases]).reshape(-1, 3)


def _overall(cases: Sequence[Mapping], names: Sequence[str], seed: int) -> Iterator[Row]:
    if not cases:
        return
    times_BX = counts.resampled([c["size"] for c in cases], seed)
    mine = _triples(cases, OURS) if OURS in names else None
    for name in names:
        own = _triples(cases, name)
        row = {"part": "overall", "detector": name, "what": what(name)} | counts.summary(
            own, times_BX
        )
        if mine is not None and name != OURS:
            row |= counts.difference(mine, own, times_BX)
        row["delay_s"] = counts.delays([d for _, d in _named(cases, name) if d is not None])
        yield row


def _named(cases: Sequence[Mapping], name: str) -> Iterator[tuple[Mapping, float | None]]:
    """Yields each fault and its delay."""
    for case in cases:
        named = counts.judged(case, case["said"][name])["named"]
        yield from zip(case["faults"], named, strict=True)


def _kinds(cases: Sequence[Mapping], name: str) -> Iterator[Row]:
    """Recall by kind of fault, and of those that slow the job or stop it."""
    every = list(_named(cases, name))
    tests: dict[str, Callable[[Mapping], bool]] = {
        kind: lambda f, kind=kind: f["kind"] == kind
        for kind in dict.fromkeys(f["kind"] for f, _ in every)
    }
    tests |= {
        "(slows the job)": lambda f: 0 < f["speed"] < 1,
        "(stops the job)": lambda f: f["speed"] == 0,
        "(neither)": lambda f: f["speed"] == 1,
    }
    for kind, test in tests.items():
        found = [(f, d) for f, d in every if test(f)]
        if not found:
            continue
        hits = [d for _, d in found if d is not None]
        before = sum(d is not None and f["start"] + d <= f["end"] for f, d in found)
        yield {
            "part": "kind", "detector": name, "kind": kind, "faults": len(found),
            "named": len(hits), "before_halt": before, "recall": len(hits) / len(found),
            "recall_95": wilson(len(hits), len(found)), "delay_s": counts.delays(hits),
        }  # fmt: skip


def wilson(hits: int, of: int) -> list[float]:
    """Returns the 95 % interval of a share (Wilson 1927)."""
    z, p = 1.959964, hits / of
    middle = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * np.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return [float(max(middle - half, 0)), float(min(middle + half, 1))]


def _alarms(healthy: Sequence[Mapping], name: str) -> Iterator[Row]:
    seen = [c for c in healthy if name in c["said"]]
    if seen:
        vain = sum(counts.triple(c, c["said"][name])[1] for c in seen)
        days = sum(c["seconds"] for c in seen) / 86400
        yield {"part": "alarms", "detector": name, "machines": seen[0]["size"],
               "jobs": len(seen)} | counts.rate(vain, days)  # fmt: skip


def _costs(found: Sequence[Mapping], name: str) -> Iterator[Row]:
    for size in sorted({c["size"] for c in found}):
        mine = [c for c in found if c["size"] == size and name in c["took"]]
        if mine:
            each = [1000 * c["took"][name] / c["seconds"] for c in mine]
            # CPU time of a process of one thread
            yield {"part": "cost", "detector": name, "size": size,
                   "ms_a_second_of_data": float(np.median(each))}  # fmt: skip
