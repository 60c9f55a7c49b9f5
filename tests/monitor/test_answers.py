"""Answers of Prometheus' API, beside the JSON parser."""

import json

import numpy as np
import pytest

from megajax.monitor.sources import http_query


def answer(*values, **more):
    labels = [{"instance": f"h{k}", **more} for k in range(len(values))]
    result = [{"metric": m, "values": v} for m, v in zip(labels, values, strict=True)]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def is_fast(said):
    return isinstance(said["data"]["result"][0]["values"], np.ndarray)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_points_are_numbers_and_all_else_is_as_in_json(seed, separators):
    rng = np.random.default_rng(seed)
    special = ["NaN", "+Inf", "-Inf", "1e-7", "0"]
    points = [
        [
            [1_700_000_000 + t / 4, str(rng.choice([*special, repr(float(rng.normal()))]))]
            for t in range(size)
        ]
        for size in (1, 50, 999)
    ]
    said = answer(*points, pod='a"values":[[1,"2"]]b')
    loaded = http_query.load(json.dumps(said, separators=separators).encode())
    assert is_fast(loaded) == (separators == (",", ":"))  # as Prometheus writes them
    for series, expected in zip(loaded["data"]["result"], points, strict=True):
        numbers = [[t, float(v)] for t, v in expected]
        np.testing.assert_array_equal(np.array(series.pop("values"), np.float64), numbers)
    for series in said["data"]["result"]:
        del series["values"]
    assert loaded == said


@pytest.mark.parametrize(
    "said",
    [
        answer([[1, "2"]], values="x"),
        answer([]),
        answer([[1, "2", "3"], [4, "5"]]),
        answer([[1, 2]]),
        answer([["1", "2"]]),
        answer([[1, "1.2.3"]]),
        answer([[1, "two"]]),
        {"status": "success", "data": {"values": [[1, "2"]]}},
        {"values": [[1, "2"]], "data": 7},
        {"status": "success", "data": ["a", "b"]},
    ],
)
def test_what_is_no_series_of_points_is_as_json_has_it(said):
    assert http_query.load(json.dumps(said, separators=(",", ":")).encode()) == said


@pytest.mark.parametrize("cut", range(1, 140, 3))
def test_half_an_answer_is_none(cut):
    text = json.dumps(answer([[1, "2"], [3, "4"]], [[5, "6"]]), separators=(",", ":")).encode()
    assert len(text) > 140
    with pytest.raises(ValueError):
        http_query.load(text[:cut])
    with pytest.raises(ValueError):
        http_query.load(text[:-cut])
