"""What the fuzzer (tests/fuzz.py) is made of: inputs that are good, and edits that come again."""

import contextlib
import random

import pytest

from megajax.core.errors import UserError
from tests import fuzz_tables
from tests.fuzz_targets import TARGETS, _edit_header
from tests.mutations import COMMON, PICKLE, TEXT, edit_json, move_field, mutate, set_field

LIGHT = ["wire", "records", "safetensors", "zips", "legacy", "dcp", "idx"]
LIGHT += [
    "quantization",
    "segment",
    "settings",
    "report",
    "spans",
    "progress",
    "attempt",
    "step",
    "table",
    "stats",
    "lock",
    "sent",
    "chats",
    "archive",
    "image",
    "coco",
    "voc",
    "yolo",
    "boxes",
]
LIGHT += [*fuzz_tables.TARGETS]


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


# Files that stay well-formed: only what their tables say of offsets, counts, sizes and orders is
# another. How many inputs each gets is chosen by time; `python -m tests.fuzz` has no end of them.
WELL_FORMED = {
    "idx": (150, [set_field, move_field]),
    "safetensors": (100, [_edit_header]),
    "segment": (150, [edit_json]),
    "coco": (100, [edit_json]),
    "chats": (60, [edit_json]),
    "quantization": (100, [edit_json]),
    "spm": (40, [fuzz_tables.edit_message]),
    "merges": (80, [edit_json]),
    "wordpiece": (40, [fuzz_tables.edit_rows]),
    "csv": (40, [fuzz_tables.edit_rows]),
    "parquet": (60, [fuzz_tables.edit_footer]),
    "npz": (80, [fuzz_tables.edit_member]),
    "xplane": (30, [fuzz_tables.edit_message]),
    "template": (30, [fuzz_tables.edit_template]),
}


@pytest.mark.parametrize("name", WELL_FORMED)
def test_tables_that_are_not_true_are_refused_or_read(name, tmp_path):
    count, edits = WELL_FORMED[name]
    (tmp_path / "seeds").mkdir()
    seeds = TARGETS[name].seeds(tmp_path / "seeds")
    for number in range(count):
        data = mutate(random.Random(f"well-formed {number}"), seeds, edits)
        (home := tmp_path / str(number)).mkdir()
        with contextlib.suppress(UserError, OSError):
            TARGETS[name].read(data, home)
