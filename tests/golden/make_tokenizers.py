"""Makes tests/golden/tokenizers.json.gz: what transformers makes of many tokenizer folders.

Run it in an environment of its own (it needs transformers, sentencepiece and protobuf, which
megajax does not):

    python -m venv hf && hf/bin/pip install torch transformers sentencepiece protobuf
    hf/bin/python tests/golden/make_tokenizers.py

`special_folders` are written again by the tests; for each the file holds the ids that
AutoTokenizer puts before and behind a text, its eos_token_id, and the eos_token_id of the
GenerationConfig that a model of the folder would have. Made with transformers 5.24.0.
"""

import gzip
import itertools
import json
import pathlib
import shutil
import tempfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FILE = pathlib.Path(__file__).with_name("tokenizers.json.gz")
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<s>", "</s>", "<|bos|>"]


def byte_level():
    """A small byte-level BPE with five special tokens, as a tokenizer.json's object."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["hello world"], trainer)
    return made


def post_processors(made):
    """{name: post_processor of a tokenizer.json}."""

    def template(single):
        named = [(t, made.token_to_id(t)) for t in ("<s>", "</s>") if t in single.split()]
        other = Tokenizer.from_str(made.to_str())
        other.post_processor = processors.TemplateProcessing(single, None, named)
        return json.loads(other.to_str())["post_processor"]

    byte = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    found = {"none": None, "bytes": byte, "begin": template("<s> $A")}
    found["both"] = {"type": "Sequence", "processors": [byte, template("<s> $A </s>")]}
    found["roberta"] = {
        "type": "RobertaProcessing", "sep": ["</s>", 3], "cls": ["<s>", 2], "trim_offsets": True,
        "add_prefix_space": False,
    }  # fmt: skip
    return found


OBJECT = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False,
          "single_word": False}  # fmt: skip
SETTINGS = [
    {},
    {"bos_token": None, "eos_token": "<|im_end|>"},
    {"bos_token": "<|bos|>", "eos_token": {"__type": "AddedToken", **OBJECT}},
    {"bos_token": "<|bos|>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    {"bos_token": {"__type": "AddedToken", **OBJECT}, "eos_token": None, "add_bos_token": False},
]
CLASSES = [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer"]
FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "mistral"]
MAPS = [None, {"bos_token": "<s>", "eos_token": OBJECT}, {"eos_token": None}]
EOS = [{}, {"eos_token_id": None}, {"eos_token_id": 7}, {"eos_token_id": [5, 1]}]


def special_folders():
    """Yields {name of a file: its object} of each case."""
    made = byte_level()
    raw, posts = json.loads(made.to_str()), post_processors(made)

    def folder(post, kind, family, settings, mapped=None, model=None, generation=None):
        files = {"tokenizer.json": raw | {"post_processor": posts[post]}}
        if settings is not None:
            named = {} if kind is None else {"tokenizer_class": kind}
            files["tokenizer_config.json"] = settings | named
        if mapped is not None:
            files["special_tokens_map.json"] = mapped
        files["config.json"] = {"model_type": family} | (model or {})
        if generation is not None:
            files["generation_config.json"] = generation
        return files

    for post, kind, family, settings in itertools.product(posts, CLASSES, FAMILIES, SETTINGS):
        yield folder(post, kind, family, settings)
    for settings, mapped, decoder in itertools.product(SETTINGS, MAPS, (False, True)):
        more = {"added_tokens_decoder": {"3": OBJECT | {"special": True}}} if decoder else {}
        yield folder("none", CLASSES[1], "llama", settings | more, mapped)
    for settings, model, generation in itertools.product(
        ({}, {"eos_token": "<|im_end|>"}), EOS, (None, *EOS)
    ):
        yield folder("none", CLASSES[1], "llama", settings, None, model, generation)
        yield folder("none", CLASSES[1], "qwen3", settings, None, model, generation)


def write(files, path):
    """Writes a folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))


def special_ids(path):
    """Returns [ids before, ids behind, eos_token_id, eos_token_id of generation]."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(path)
    with_, bare = (tokenizer("hello", add_special_tokens=b)["input_ids"] for b in (True, False))
    at = next(i for i in range(len(with_)) if with_[i : i + len(bare)] == bare)
    if (path / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(path)
    else:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    eos = generation.eos_token_id
    return [with_[:at], with_[at + len(bare) :], tokenizer.eos_token_id, eos]


def main():
    """Writes the file."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "folder"
        found["special"] = []
        for files in special_folders():
            write(files, path)
            found["special"].append(special_ids(path))
    text = json.dumps(found, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print({name: len(cases) for name, cases in found.items()}, FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
