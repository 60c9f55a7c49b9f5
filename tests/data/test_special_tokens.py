"""Begin and end tokens. Oracle: transformers 5.24, frozen by tests/golden/make_tokenizers.py."""

import hashlib
import json
import lzma
import re

import pytest

from megajax.core.errors import UserError
from megajax.data.tokenizer import open_tokenizer, train_bpe
from tests.golden import make_tokenizers as made


@pytest.fixture(scope="module")
def golden():
    return json.loads(lzma.decompress(made.FILE.read_bytes()))


def test_begin_and_end_are_those_of_transformers(golden, tmp_path):
    """735 folders: null, absent, text and object; classes, families, maps, post_processors."""
    cases = list(zip(made.special_folders(), golden["special"], strict=True))
    for files, (before, after, eos, stops) in cases[:625:4] + cases[625:]:
        made.write(files, tmp_path / "f")
        tokenizer = open_tokenizer(str(tmp_path / "f"))
        stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
        said = "generation_config.json" in files or "eos_token_id" in files["config.json"]
        if not said and (after or eos is not None):
            stops = []  # of the model's class, and the tokenizer names another
        stops = [i for i in stops if i < tokenizer.vocab]
        config = {name: content for name, content in files.items() if name != "tokenizer.json"}
        assert tokenizer.prefix() == before, config
        assert tokenizer.begin == (before[0] if before else None), config
        end = after[0] if after else eos if eos is not None else stops[0] if stops else None
        if end is not None:
            assert tokenizer.end == end, config
            assert set(tokenizer.ends) == {end, *stops}, config


def test_every_end_survives_the_copy_into_a_run(tmp_path):
    """config.json is not copied, as a run has one of its own; what it says of ends is."""
    for i, files in enumerate(made.special_folders()):
        if "eos_token_id" not in files["config.json"] and i % 50:
            continue
        made.write(files, tmp_path / "there")
        theirs = open_tokenizer(str(tmp_path / "there"))
        theirs.copy_to(tmp_path / str(i))
        (tmp_path / str(i) / "config.json").write_text('{"model": {}, "data": {}}')
        ours = open_tokenizer(str(tmp_path / str(i)))
        assert (ours.begin, ours.end, ours.ends) == (theirs.begin, theirs.end, theirs.ends)
        assert ours.identity == theirs.identity


def test_usual_names_count_where_no_file_says_anything(tmp_path):
    train_bpe(["hello"], 300, tmp_path / "tokenizer.json")
    for files, expected in (
        ({}, (0, 1)),
        ({"tokenizer_config.json": {}}, (None, None)),
        ({"special_tokens_map.json": {"eos_token": "<|bos|>"}}, (None, 0)),
        ({"generation_config.json": {"eos_token_id": None}}, (0, None)),
        ({"config.json": {"model_type": "qwen3", "eos_token_id": 5}}, (0, 5)),
        ({"config.json": {"model": {}, "eos_token_id": 5}}, (0, 1)),  # of a run of ours
    ):
        for name in (
            "tokenizer_config.json",
            "special_tokens_map.json",
            "generation_config.json",
            "config.json",
        ):
            (tmp_path / name).unlink(missing_ok=True)
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
        tokenizer = open_tokenizer(str(tmp_path))
        assert (tokenizer.begin, tokenizer.end) == expected, files
    # The identity that runs on bpe:N have had, so that they resume: of the file and these ids.
    raw = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "config.json").unlink()
    expected = hashlib.blake2b(raw + b" 0 1", digest_size=8).hexdigest()
    assert open_tokenizer(str(tmp_path)).identity == expected


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"tokenizer_config.json": {"eos_token": "<gone>"}},
            "eos_token is '<gone>', which is none",
        ),
        ({"generation_config.json": {"eos_token_id": "</s>"}}, "eos_token_id is '</s>'; it must"),
        (
            {"config.json": {"model_type": "llama", "eos_token_id": [1, True]}},
            "eos_token_id is [1,",
        ),
        ({"config.json": {"model_type": "llama", "eos_token_id": 2**31}}, "eos_token_id is 2147"),
        ({"generation_config.json": [2]}, "must hold a JSON object"),
    ],
)
def test_what_no_reader_could_mean_is_refused(tmp_path, files, words):
    train_bpe(["hello"], 300, tmp_path / "tokenizer.json")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=re.escape(words)):
        open_tokenizer(str(tmp_path))


def test_several_tokens_before_a_text_are_refused(tmp_path):
    train_bpe(["hello"], 300, tmp_path / "tokenizer.json")
    members = json.loads((tmp_path / "tokenizer.json").read_text())
    two = {"type": "Sequence", "processors": [made.post_processors(made.byte_level())["begin"]] * 2}
    (tmp_path / "tokenizer.json").write_text(json.dumps(members | {"post_processor": two}))
    with pytest.raises(UserError, match="puts 2 tokens before a text"):
        open_tokenizer(str(tmp_path))
