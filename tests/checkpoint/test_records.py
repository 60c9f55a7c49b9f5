"""Integrity records that are sealed well and say what no save would."""

import json

import pytest

from megajax.checkpoint import orbax_io, trust
from megajax.checkpoint.steps import METADATA, StepFolder
from megajax.checkpoint.trust import CheckpointError, DamagedError

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
    (tmp_path / trust.RECORD).write_text(trust.seal_text(body))
    assert trust.read_record(tmp_path).files["a"].bytes == 5


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
    (tmp_path / trust.RECORD).write_text(trust.seal_text(text))
    with pytest.raises(DamagedError, match=f"integrity.json: .*{said}"):
        trust.read_record(tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 50_000, '{"custom_metadata": 5}', '{"custom_metadata": [1]}']
)
def test_a_description_that_no_save_writes_is_no_traceback(text, tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / METADATA).write_text(text)
    steps = StepFolder(tmp_path)
    assert steps.steps() == ([] if text[0] == "[" else [7])
    assert text[0] == "[" or steps.record(7) is None  # as plain Orbax would have left it
    with pytest.raises(CheckpointError, match="cannot read step 7"):
        steps.data_state(7)


def test_chunks_that_no_array_has_are_unknown(tmp_path):
    home = tmp_path / "state" / "array_metadatas"
    home.mkdir(parents=True)
    shapes = {"a": [2, 3], "b": [0, 3], "c": ["2"], "d": [2.0]}
    entries = [{"array_metadata": {"param_name": n, "chunk_shape": s}} for n, s in shapes.items()]
    (home / "process_0").write_text(json.dumps({"array_metadatas": entries}))
    (home / "process_1").write_text("[" * 50_000)
    assert orbax_io.stored_chunks(tmp_path) == {"a": (2, 3)}
