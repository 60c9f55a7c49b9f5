"""Integrity records that are sealed well and say what no save would."""

import json

import pytest

from megajax.checkpoint import integrity
from megajax.checkpoint.integrity import DamagedError

GOOD = {
    "step": 1,
    "files": {"a": {"bytes": 5, "crc32": [7]}},
    "leaves": {},
    "metric": None,
    "version": 1,
}
LEAF = {"shape": [2], "dtype": "int8", "fingerprint": [1, 2]}


def test_a_good_record(tmp_path):
    body = json.dumps(GOOD | {"leaves": {"w": LEAF}})
    (tmp_path / integrity.RECORD).write_text(integrity._sealed(body))
    assert integrity.read_record(tmp_path).files["a"].bytes == 5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[" * 100_000, "nested too deep"),
        (GOOD | {"files": {"../a": {"bytes": 0, "crc32": []}}}, "leads out of the step's folder"),
        (GOOD | {"files": {"/etc/passwd": {"bytes": 0, "crc32": []}}}, "leads out"),
        (GOOD | {"files": {"a": {"bytes": 5, "crc32": []}}}, "a has 0 checksums for 5 bytes"),
        (GOOD | {"files": {"a": {"bytes": -5, "crc32": [1]}}}, "a has 1 checksums for -5 bytes"),
        (GOOD | {"files": {"a": {"bytes": "5", "crc32": [1]}}}, "checksums for '5' bytes"),
        (GOOD | {"files": {"a": {"bytes": 5, "crc32": [-1]}}}, "whole numbers below"),
        (GOOD | {"files": {"a": {"bytes": 5, "crc32": 7}}}, "list"),
        (GOOD | {"leaves": {"w": LEAF | {"shape": "2"}}}, "list"),
        (GOOD | {"leaves": {"w": LEAF | {"dtype": 3}}}, "leaf w has a dtype that is no text"),
        (GOOD | {"leaves": {"w": LEAF | {"shape": [1] * 100}}}, "leaf w has 100 dimensions"),
        (GOOD | {"step": "1"}, "step '1'"),
        (GOOD | {"metric": "low"}, "a metric that is no number"),
    ],
)
def test_what_no_save_writes_is_damage(body, said, tmp_path):
    text = body if isinstance(body, str) else json.dumps(body)
    (tmp_path / integrity.RECORD).write_text(integrity._sealed(text))
    with pytest.raises(DamagedError, match=f"integrity.json: .*{said}"):
        integrity.read_record(tmp_path)
