"""Makes tests/golden/tokenizers.json.xz: what transformers makes of many tokenizer folders.

Run it in an environment of its own (it needs transformers, sentencepiece and protobuf, which
megajax does not):

    python -m venv hf && hf/bin/pip install torch transformers sentencepiece protobuf
    hf/bin/python tests/golden/make_tokenizers.py

`special_folders` are written again by the tests; for each the file holds the ids that
AutoTokenizer puts before and behind a text, its eos_token_id, and the eos_token_id of the
GenerationConfig that a model of the folder would have. Of `other_folders`, whose tokenizers lie in
tokenizer.model, vocab.json or vocab.txt, it holds the files and the ids of hostile texts. Made with
transformers 5.24.0, sentencepiece 0.2.3.
"""

import base64
import io
import itertools
import json
import lzma
import pathlib
import shutil
import tempfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FILE = pathlib.Path(__file__).with_name("tokenizers.json.xz")
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<s>", "</s>", "<|bos|>"]


def byte_level(texts=("hello world",), size=270):
    """A small byte-level BPE with five special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def post_processors(made):
    """{name: post_processor of a tokenizer.json}."""

    def template(single):
        named = [(t, made.token_to_id(t)) for t in ("<s>", "</s>") if t in single.split()]
        other = Tokenizer.from_str(made.to_str())
        other.post_processor = processors.TemplateProcessing(single, None, named)
        return json.loads(other.to_str())["post_processor"]

    byte = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    by_name = {"none": None, "bytes": byte, "begin": template("<s> $A")}
    by_name["both"] = {"type": "Sequence", "processors": [byte, template("<s> $A </s>")]}
    by_name["roberta"] = {
        "type": "RobertaProcessing",
        "sep": ["</s>", 3],
        "cls": ["<s>", 2],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    return by_name


OBJECT = {
    "content": "</s>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
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


TEXTS = [
    "hello world",
    "",
    " ",
    "  leading and  double  ",
    "a",
    "Hello, World! It's they'll WE'RE don't",
    "tab\tnew\nline\r\n\n\n end",
    "na\u00efve cafe\u0301 \u00bd x\u00b2 \ufb01ne \u2126",
    "\u6c49\u5b57 \u65e5\u672c\u8a9e",
    "\U0001f642\U0001f468\u200d\U0001f469 \u0000 \u2028 \u00a0x",
    "1234567 3.14 x1y2",
    "\u2581already \u2581",
    "<usr>abab <usr> cab",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "  \n  x  \n",
    "def f(x):\n    return x + 1\n",
    "\u0623\u0647\u0644\u0627 \u05e9\u05dc\u05d5\u05dd",
    "zzz\u0301 e\u0301e\u0301",
]
RULES = "00BD\t31 2044 32\nFB01\t66 69\nB2\t32\nA0\t20\n9\t20\n2126\t3A9\n"


def sentencepiece_models():
    """{name: a tokenizer.model}: with small rules of normalisation, without, and both kinds."""
    import sentencepiece

    source = pathlib.Path(__file__).read_text().splitlines() + TEXTS * 2
    lines = [line for line in source if line.strip() and "\0" not in line]
    trained = {}

    def train(name, size, **options):
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=made,
            vocab_size=size,
            minloglevel=2,
            hard_vocab_limit=False,
            **options,
        )
        trained[name] = made.getvalue()

    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write(RULES)
        rules.flush()
        plain = {"normalization_rule_name": "identity", "byte_fallback": True}
        rules_of_file = {"normalization_rule_tsv": rules.name}
        user = {"user_defined_symbols": ["<usr>", "ab"], "control_symbols": ["<ctl>"]}
        bare = {"remove_extra_whitespaces": False}
        train("llama", 480, model_type="bpe", character_coverage=0.98, **plain, **bare)
        train("bpe_rules", 320, model_type="bpe", pad_id=3, **rules_of_file, **user)
        train("unigram_rules", 320, model_type="unigram", **rules_of_file, **user)
        train("unigram", 480, model_type="unigram", add_dummy_prefix=False, **plain, **bare)
        train("moved", 320, model_type="unigram", unk_id=2, bos_id=-1, eos_id=0, unk_piece="[U]")
    return trained


def other_folders():
    """Yields {name of a file: its bytes, text or object}: no tokenizer.json is among them."""
    both_added = {"add_bos_token": True, "add_eos_token": True}
    token = {"lstrip": False, "rstrip": False, "single_word": False, "special": True}
    unknown = {"0": {"content": "<unk>", "normalized": True} | token}
    llama = {"tokenizer_class": "LlamaTokenizer"}
    for name, model in sentencepiece_models().items():
        settings = [
            ("llama", None),
            ("mistral", llama | {"add_bos_token": True, "legacy": False}),
            ("mistral", llama | both_added | {"added_tokens_decoder": unknown, "bos_token": None}),
        ]
        if name in ("llama", "bpe_rules"):
            settings += [
                ("llama", llama),
                ("llama", llama | both_added | {"legacy": True, "pad_token": "</s>"}),
                ("llama", llama | {"add_prefix_space": False, "eos_token": "<s>"}),
            ]
        for family, said in settings:
            more = {} if said is None else {"tokenizer_config.json": said}
            yield {"tokenizer.model": model, "config.json": {"model_type": family}} | more
    made = json.loads(byte_level(pathlib.Path(__file__).read_text().splitlines(), 400).to_str())
    vocab = {t: i for t, i in made["model"]["vocab"].items()}
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in made["model"]["merges"])
    size = len(vocab)
    added = {str(size): {"content": "<new>", "normalized": False} | token}
    for family, said in (
        ("gpt2", None),
        ("gpt2", both_added | {"add_prefix_space": True, "bos_token": "<s>"}),
        (
            "qwen2",
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": added,
            },
        ),
        ("qwen3", None),
        ("llama", {"tokenizer_class": "GPT2Tokenizer", "pad_token": "<pad>"}),
        ("roberta", {"tokenizer_class": "RobertaTokenizer"}),
        ("llama", {"tokenizer_class": "GPTNeoXTokenizer", "extra_special_tokens": ["<more>"]}),
    ):
        more = {} if said is None else {"tokenizer_config.json": said}
        files = {"vocab.json": vocab, "merges.txt": merges}
        yield files | {"config.json": {"model_type": family}} | more
    special = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    words = "hello world a b c d e ##l ##o ##a na ##ive caf ##e !".split()
    text = "\n".join([*special, *words, "\u6c49", "na\u00efve", "1", "##2", ""])
    for said in (None, {"do_lower_case": False, "tokenize_chinese_chars": False}):
        more = {} if said is None else {"tokenizer_config.json": said}
        yield {"vocab.txt": text, "config.json": {"model_type": "bert"}} | more


def write(files, path):
    """Writes a folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name).write_text(text)


def text_ids(path):
    """Returns [bos_token_id, eos_token_id, [ids of each of TEXTS]]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    return [tokenizer.bos_token_id, tokenizer.eos_token_id, ids]


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
    golden = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "folder"
        golden["special"] = []
        for files in special_folders():
            write(files, path)
            golden["special"].append(special_ids(path))
        golden["others"] = []
        for files in other_folders():
            write(files, path)
            plain = {
                name: {"base64": base64.b64encode(content).decode()}
                if isinstance(content, bytes)
                else content
                for name, content in files.items()
            }
            golden["others"].append([plain, text_ids(path)])
    text = json.dumps(golden, separators=(",", ":"))
    FILE.write_bytes(lzma.compress(text.encode()))
    print({name: len(cases) for name, cases in golden.items()}, FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
