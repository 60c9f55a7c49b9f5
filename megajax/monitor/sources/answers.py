"""Answers of Prometheus' HTTP API as Python values, fast.

A range query's answer is nearly all points, `[1700000000,"0.25"]`. As objects each takes 200 bytes
and the garbage collector's time, so that the points of a series are read as numbers at once, and
only what is left of the text is given to the JSON parser. What does not look like points goes to
the JSON parser as a whole. Either text is refused when its values would take far more memory.
"""

from typing import Any

import numpy as np

from megajax.core.files import parse_json

_KEY = b'"values":'
_POINTS = b'0123456789+-.eE,NaInf[]"'  # the bytes that points are made of


def load(text: bytes) -> Any:
    """Returns what json.loads returns, but each "values" of points as float64 (points, 2).

    Raises: ValueError for what is no JSON; core.files.TooManyValues, which is one.
    """
    rest, found, at = [], [], 0
    begin = text.find(_KEY) + len(_KEY)
    while begin >= len(_KEY):  # a series at a time: all of them at once are the text again
        following = text.find(_KEY, begin)
        end = text.find(b"]]", begin, following if following >= 0 else len(text)) + 2
        points = _numbers(text[begin:end]) if text.startswith(b"[[", begin) and end > 2 else None
        if points is None:
            return parse_json(text)
        rest.append(b"%b%d" % (text[at:begin], len(found)))
        found.append(points)
        begin, at = following + len(_KEY), end
    rest.append(text[at:])
    said = parse_json(b"".join(rest))
    if found:
        try:
            for series in said["data"]["result"]:
                if "values" in series:
                    series["values"] = found[series["values"]]
        except (LookupError, TypeError):  # the word stands elsewhere
            return parse_json(text)
    return said


def _numbers(points: bytes) -> np.ndarray | None:
    """Returns [[time,"value"],...] as numbers, None for what is something else."""
    size = points.count(b",") + 1
    if size % 2 or points.count(b'"') != size or points.translate(None, _POINTS):
        return None
    text = points.translate(None, b'[]"').decode()
    try:
        found = np.fromstring(text, np.float64, sep=",")
    except (ValueError, DeprecationWarning):
        return None
    return found.reshape(-1, 2) if found.size == size else None
