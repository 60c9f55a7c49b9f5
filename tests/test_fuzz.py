"""What the fuzzer (tests/fuzz.py) is made of: inputs that are good, and edits that come again."""

import random

import pytest

from tests.fuzz_targets import TARGETS
from tests.mutations import COMMON, PICKLE, TEXT, mutate

LIGHT = ["wire", "records", "safetensors", "zips", "legacy", "dcp", "idx"]
LIGHT += ["settings", "report", "spans", "progress", "attempt", "step", "table", "stats", "lock"]


@pytest.mark.parametrize("name", LIGHT)
def test_good_inputs_are_read_and_inputs_can_be_made_again(name, tmp_path):
    target = TARGETS[name]
    (tmp_path / "seeds").mkdir()
    seeds = target.seeds(tmp_path / "seeds")
    (tmp_path / "home").mkdir()
    target.read(seeds[0], tmp_path / "home")
    made = [mutate(random.Random(f"0 {i}"), seeds, target.edits) for i in range(20)]
    assert made == [mutate(random.Random(f"0 {i}"), seeds, target.edits) for i in range(20)]
    assert len(set(made)) > 15


def test_every_edit_takes_any_bytes():
    for seed, data in enumerate((b"", b"x", b"{}", b'{"a": [1, 2]}', bytes(40))):
        for edit in (*COMMON, *TEXT, *PICKLE):
            assert isinstance(edit(random.Random(seed), data), bytes)
