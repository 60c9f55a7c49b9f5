"""The table of names.py as expressions of Prometheus.

A range query looks back 5 minutes for the last sample of a series, which would hide that a series
has stopped. Every series is therefore used only while its newest sample is younger than two and a
half scrape intervals, which `timestamp` tells; and rates are those between the last two readings
(`irate`), as in convert.py. Series of one machine (the label `instance`) become one, because eight
GPUs and hundreds of processors would else be sent for every host.
"""

from collections.abc import Collection, Mapping

from megajax.monitor.sources import names
from megajax.monitor.sources.names import COUNTER, Way

FRESH, BACK = 2.5, 3.5  # (chosen) scrape intervals: the age of a sample, and how far a rate looks
MACHINE = "instance"
_OVER = {"": "avg", names.LEAST: "min", names.GREATEST: "max"}


def exporter_names(metric: str) -> tuple[str, ...]:
    """Returns all series that a metric may come from."""
    ways = names.METRICS.get(split(metric)[0], ())
    found = [n for way in ways for n in (*way.names, way.rest_of) if n not in ("", "1")]
    return tuple(dict.fromkeys(found))


def split(metric: str) -> tuple[str, str]:
    """Returns (metric of the table, "_min", "_max" or ""); gpu_count is of the first counted."""
    if metric == names.GPU_COUNT:
        return names.COUNTED[0], ""
    for suffix in (names.LEAST, names.GREATEST):
        if metric.endswith(suffix) and metric.removesuffix(suffix) in names.METRICS:
            return metric.removesuffix(suffix), suffix
    return metric, ""


def all_metrics() -> tuple[str, ...]:
    """Returns every metric that there is an expression for, extremes included."""
    found = []
    for metric, ways in names.METRICS.items():
        found += [metric] * bool(ways)
        if any(way.over == "devices" and _is_per_gpu(way) for way in ways):
            found += [metric + names.LEAST, metric + names.GREATEST]
    return (*found, names.GPU_COUNT)


def expression(metric: str, intervals: Mapping[str, float]) -> str | None:
    """Returns the expression of a metric, None where the server has no series for it.

    intervals: scrape interval in seconds of each of an exporter's names that the server has.
    """
    base, suffix = split(metric)
    for way in names.METRICS.get(base, ()):
        there = [n for n in way.names if n in intervals]
        needed = [*way.names, way.rest_of] if way.over == "devices" else [way.rest_of]
        if there and all(n in ("", "1") or n in intervals for n in needed):
            over = "count" if metric == names.GPU_COUNT else _over(way, suffix)
            return f"{over} by ({MACHINE}) ({_value(way, there, intervals)})"
    return None


def _over(way: Way, suffix: str) -> str:
    return _OVER[suffix] if way.over == "devices" else {"mean": "avg"}.get(way.over, way.over)


def _value(way: Way, there: Collection[str], intervals: Mapping[str, float]) -> str:
    """Returns the value of every device."""
    parts = [_series(name, way, intervals[name]) for name in there]
    if len(parts) == 1:
        found = parts[0]
    elif way.over == "devices":  # equal labels
        found = " + ".join(f"({p})" for p in parts)
    else:  # the labels of two names may be equal: another label tells them apart
        found = " or ".join(
            f'label_replace({p}, "of", "{k}", "{MACHINE}", ".*")' for k, p in enumerate(parts)
        )
    if way.scale != 1:
        found = f"{way.scale!r} * ({found})"
    if way.rest_of == "1":
        return f"1 - ({found})"
    if way.rest_of:
        return f"1 - ({found}) / ({_series(way.rest_of, way, intervals[way.rest_of])})"
    return found


def _series(name: str, way: Way, interval: float) -> str:
    """Returns the fresh values, or rates, of an exporter's series."""
    selector = f"{name}{{{way.only}}}" if way.only else name
    rate = way.kind == COUNTER and name != way.rest_of
    value = f"irate({selector}[{_duration(BACK * interval)}])" if rate else selector
    return f"({value} and timestamp({selector}) > time() - {FRESH * interval:.3f})"


def _duration(seconds: float) -> str:
    return f"{max(1, round(1000 * seconds))}ms"


def _is_per_gpu(way: Way) -> bool:
    return any(name.startswith("DCGM_") for name in way.names)
