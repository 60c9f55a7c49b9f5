"""Tables of SDP4Bit's study: what stands in a cell, of results written by hand."""

import json

import pytest

from experiments.reports import sdp4bit
from tests.experiments.reports.test_sdp4bit_bytes import collectives
from tests.experiments.reports.test_sdp4bit_runs import study

ABOUT = {
    "device": "cpu",
    "layer": "trained here",
    "date": "2026-01-02",
    "commit": "abc",
    "layers": 2,
    "width": 64,
    "steps": 400,
    "tokens": 409600,
    "nodes": 2,
    "ranks": 2,
}


@pytest.fixture
def path(tmp_path):
    runs, n = study(), 2**20
    made = [*runs, *sdp4bit.gaps(runs), *sdp4bit.claims(runs)]
    made += sdp4bit.count("half", collectives(n, n, n // 4), n)
    path = tmp_path / "sdp4bit.json"
    path.write_text(json.dumps(ABOUT | {"rows": made}))
    return path


def cells(text, first):
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_losses_stand_beside_the_papers(path):
    text = sdp4bit.losses(path)
    assert cells(text, "qW")[3:] == [
        "+6.00 ± 0.01 %",
        "+6.00 ± 0.01 %",
        "3",
        "+12.17 %",
        "+8.95 %",
        "+6.14 %",
    ]
    assert cells(text, "fp8")[-3:] == ["-"] * 3 and cells(text, "float32")[3] == "+0.00 ± 0.00 %"
    assert "409,600 tokens, 2 nodes of 2 emulated devices" in text
    assert text.endswith("*trained here, emulated cpu, 2026-01-02, abc*")


def test_claims_say_whether_they_hold(path):
    text = sdp4bit.claims_table(path)
    assert cells(text, "SDP4Bit at most 0.24 % above float32")[1:] == [
        "+0.12 ± 0.01 %",
        "yes",
        "yes",
        "3",
    ]
    runs = study({sdp4bit.FLOAT32: 0.0, "SDP4Bit": 0.4}, seeds=1)
    path.write_text(json.dumps(ABOUT | {"rows": list(sdp4bit.claims(runs))}))
    text = sdp4bit.claims_table(path)
    assert cells(text, "SDP4Bit at most 0.24 % above float32")[1:] == [
        "+0.39 %",
        "no",
        "one seed",
        "1",
    ]


def test_bits_by_level_and_what_is_not_counted_yet(path):
    text = sdp4bit.sent(path)
    assert cells(text, "weights, all-gather") == ["weights, all-gather", "8.0000 (0.500)"]
    assert cells(text, "all that leaves a node")[1] == "5.0000 (0.500)"
    assert "2 nodes of 4, a buffer of 1,048,576 elements" in text
    path.write_text(json.dumps(ABOUT | {"rows": []}))
    assert "--bytes" in sdp4bit.sent(path)
