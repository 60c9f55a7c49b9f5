"""What lies beside the weights of a Hugging Face folder, so that others can use them.

The tokenizer as transformers' AutoTokenizer reads it, the ids of special tokens in config.json and
generation_config.json, and the licence and model card of the weights that a run began with. The
files of the tokenizer's source are copied as they are; what they lack is added. No jax.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand, model_folder
from megajax.data import token_ids
from megajax.data.token_ids import CONFIG, GENERATION, MAP, MAX_BYTES, byte_alphabet
from megajax.data.tokenizer import (
    BESIDE,
    FILES,
    ByteTokenizer,
    FileTokenizer,
    JsonTokenizer,
    Tokenizer,
    tokenizer_file,
)

LICENCES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*", "README.md")
MAX_LICENCE = 2**22  # (chosen) bytes of such a file
BYTE_TOKENS = ("<|bos|>", "<|eos|>", "<|spare|>")  # ids 256 to 258 of the tokenizer `bytes`
CLASS = "PreTrainedTokenizerFast"  # (transformers 4 and 5) reads tokenizer.json as it stands


def find_tokenizer(source: str | Path | Tokenizer) -> Tokenizer:
    """Returns the tokenizer of a file or a folder, or 'bytes'. Raises: UserError."""
    if not isinstance(source, str | Path):
        return source
    if source == "bytes":
        return ByteTokenizer()
    place = expand(source)
    file = place if place.is_file() else tokenizer_file(place)
    if file is None:
        raise UserError(f"{place} is no tokenizer and no folder with one: {FILES} (--tokenizer)")
    return FileTokenizer(file, str(file))


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Copies the tokenizer of a file or a folder and the settings beside it; keeps what is there
    already. Raises: UserError when there is none."""
    tokenizer = find_tokenizer(source)
    if isinstance(tokenizer, JsonTokenizer):
        tokenizer.copy_to(folder)


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns {bos, eos and pad_token_id: an id, a list of them, or None}, for a config.json.

    None is written too: a class of transformers has ids of its own where the member is absent.
    """
    begin, pad = tokenizer.begin, None
    if isinstance(tokenizer, JsonTokenizer):
        tokens = tokenizer.settings.tokens
        pad = _id(tokenizer, tokens.get("pad_token"))
        if begin is None:
            begin = _id(tokenizer, tokens.get("bos_token"))
    ends = list(tokenizer.ends)
    eos = None if not ends else ends[0] if len(ends) == 1 else ends
    return {"bos_token_id": begin, "eos_token_id": eos, "pad_token_id": pad}


def write(tokenizer: Tokenizer, folder: Path, positions: int, generates: bool) -> None:
    """Writes the files of a tokenizer that AutoTokenizer reads, with the same ids.

    Args: positions: most tokens of a text. generates: whether the model writes text, so that there
      is a generation_config.json.
    """
    raw = bytes_json() if isinstance(tokenizer, ByteTokenizer) else getattr(tokenizer, "raw", None)
    if raw is None:
        raise UserError(f"the tokenizer {tokenizer.name} has no file to write (--tokenizer)")
    made = json.loads(raw)
    names = {id: token for token, id in _vocabulary(made).items()}
    if token_ids.template_ids(made.get("post_processor"))[0] != tokenizer.prefix():
        begin = tokenizer.begin  # that no file named, so that no other program knew it
        pair = None if begin is None else (names[begin], begin)
        raw = json.dumps(made | {"post_processor": token_ids.template(pair)}).encode()
    (folder / "tokenizer.json").write_bytes(raw)
    home = tokenizer.path.parent if isinstance(tokenizer, FileTokenizer) else None
    for name in BESIDE:
        if home is not None and (home / name).is_file():
            shutil.copyfile(home / name, folder / name)
    _add(folder / CONFIG, _settings(tokenizer, names, positions, folder))
    if generates:
        _add(folder / GENERATION, special_ids(tokenizer))


def _settings(
    tokenizer: Tokenizer, names: Mapping[int, str], positions: int, folder: Path
) -> dict[str, Any]:
    """Returns members of tokenizer_config.json that a source may lack."""
    members: dict[str, Any] = {"tokenizer_class": CLASS, "model_max_length": positions}
    template = getattr(tokenizer, "chat_template", None)
    if template:
        members["chat_template"] = template
    if (folder / MAP).is_file():
        return members
    said = tokenizer.settings.tokens if isinstance(tokenizer, JsonTokenizer) else {}
    for key, id in (("bos_token", tokenizer.begin), ("eos_token", tokenizer.end)):
        if name := said.get(key) or (None if id is None else names[id]):
            members[key] = name
    return members


def _add(file: Path, members: Mapping[str, Any]) -> None:
    """Adds members to the object of a JSON file; those that it has already stay."""
    there = files.read_object(file, MAX_BYTES) if file.is_file() else {}
    lacking = {k: v for k, v in members.items() if k not in there}
    if lacking:
        file.write_text(json.dumps(there | lacking, indent=2) + "\n")


def _id(tokenizer: JsonTokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.id_of(token)


def _vocabulary(made: Mapping[str, Any]) -> dict[str, int]:
    """Returns token -> id of a tokenizer.json's object."""
    vocab = made["model"].get("vocab", {})
    if isinstance(vocab, list):  # of Unigram
        vocab = {piece[0]: i for i, piece in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in made.get("added_tokens") or ()}


def bytes_json() -> bytes:
    """Returns a tokenizer.json with the ids of the tokenizer `bytes`."""
    vocab = {token: byte for token, byte in byte_alphabet().items()}
    vocab |= {token: 256 + i for i, token in enumerate(BYTE_TOKENS)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [
                {"id": 256 + i, "content": token, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False, "special": True}
                for i, token in enumerate(BYTE_TOKENS)
            ],
            "normalizer": None, "pre_tokenizer": level | {"use_regex": False},
            "post_processor": token_ids.template((BYTE_TOKENS[0], 256)),
            "decoder": level | {"use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None,
                "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": [],
            },
        }
    ).encode()  # fmt: skip


def is_replaced(tokenizer: Tokenizer, folder: Path) -> bool:
    """Tells whether AutoTokenizer would cut words by other rules than the tokenizer's: for some
    families it uses the family's class, whatever class the folder names."""
    family = files.read_object(folder / "config.json", MAX_BYTES).get("model_type")
    if family not in token_ids.FORCED or not isinstance(tokenizer, JsonTokenizer):
        return False
    return "(?i:'s|'t|'re" not in json.dumps(json.loads(tokenizer.raw).get("pre_tokenizer"))


def licences(folders: Iterable[str | Path | None]) -> list[Path]:
    """Returns the licences and model cards of folders, the first of each name."""
    files_by_name: dict[str, Path] = {}
    for folder in folders:
        try:
            place = None if folder is None else model_folder(folder, "init_from")
        except UserError:  # a folder that was removed, or no network
            continue
        if place is None or not place.is_dir():
            continue
        for pattern in LICENCES:
            for file in sorted(place.glob(pattern)):
                if file.is_file() and file.stat().st_size <= MAX_LICENCE:
                    files_by_name.setdefault(file.name, file)
    return list(files_by_name.values())


def copy_files(sources: Iterable[Path], folder: Path) -> None:
    """Copies files; keeps those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sources:
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
