"""Hugging Face folders in and out, without torch, leaf by leaf.

Import makes every device's piece of a leaf straight from the memory-mapped files: the host never
holds a whole leaf, let alone a model. Export streams the other way, one tensor at a time, and the
folder appears under its name only when it is whole. What it needs to know of the families is in
models/names.py.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from megajax.checkpoint.safetensors import SHARD_BYTES, TensorFolder, write_folder
from megajax.core import config as config_
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree, named_leaves, nest
from megajax.models import decoder, names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import map_words

# Buffers that some checkpoints carry and no model needs.
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
)  # fmt: skip


def load_config(path: str | Path) -> DecoderConfig:
    """Reads a folder's config.json. Raises: UserError when it is missing or not supported."""
    file = Path(path).expanduser() / "config.json"
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror} (--init_from)") from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    try:
        return names.from_hf_config(found)
    except KeyError as error:
        raise UserError(f"{file} lacks {error}") from None


def load(path: str | Path, layout: Layout | None = None) -> tuple[DecoderConfig, Tree]:
    """Returns (configuration, float32 parameters as `layout` stores them).

    layout: None: whole on the first device.
    Raises: UserError for a folder that is incomplete, damaged or of an unknown family.
    """
    cfg = load_config(path)
    return cfg, load_params(path, cfg, layout)


def load_params(path: str | Path, cfg: DecoderConfig, layout: Layout | None = None) -> Tree:
    """Returns the parameters of a folder for a configuration that must have its shapes.

    What does not change shapes may differ from the folder's: dropout, window, the padding of the
    vocabulary.
    """
    theirs = load_config(path)
    free = {"dropout", "window", "vocab_multiple", "max_positions", "norm_eps"}
    free |= {f"moe.{name}" for name in names.TRAINED}
    free |= {"mlp"} if cfg.moe.experts else set()
    shaping = [
        f"{name} is {old} there, {new} here"
        for name, old, new in config_.diff(cfg, theirs)
        if name not in free or (name == "max_positions" and cfg.position == "learned")
    ]
    if shaping:
        raise UserError(f"{path} has another model: {'; '.join(shaping)} (--init_from)")
    files = TensorFolder(Path(path).expanduser())
    rules = {rule.ours: rule for rule in names.rules(theirs)}
    tensors = _find_tensors(files, list(rules.values()), theirs)
    parts = decoder.parts(cfg)  # for shapes and words; no mesh needed
    leaves = {
        name: _make_leaf(rules[name], tensors, theirs, like, words, layout)
        for (name, like), words in zip(
            named_leaves(parts.abstract), _leaf_words(parts.axes), strict=True
        )
    }
    return nest(leaves)


def _leaf_words(axes: Tree) -> list[tuple]:
    found: list[tuple] = []
    map_words(found.append, axes)
    return found


def _find_tensors(
    files: TensorFolder, rules: list[names.Rule], cfg: DecoderConfig
) -> dict[str, np.ndarray]:
    """Returns views of all tensors that the rules name; refuses strangers and wrong shapes."""
    bare = "transformer."  # GPT-2's own files leave this prefix out
    found, used = {}, set()
    for rule in rules:
        for index in np.ndindex(rule.stack(cfg)):
            name = rule.name(index)
            stored = name if name in files else name.removeprefix(bare)
            view = files.view(stored)
            if view.shape != rule.their_shape(cfg):
                raise UserError(
                    f"{files.folder}: {stored} has shape {view.shape}, config.json says "
                    f"{rule.their_shape(cfg)}"
                )
            found[name] = view
            used.add(stored)
    tied = {"lm_head.weight"} if cfg.tied else set()
    strangers = [n for n in files.names() if n not in used | tied and not n.endswith(IGNORED)]
    if strangers:
        raise UserError(
            f"{files.folder} has tensors that this family does not know: {', '.join(strangers[:5])}"
        )
    return found


def _make_leaf(
    rule: names.Rule,
    tensors: Mapping[str, np.ndarray],
    cfg: DecoderConfig,
    like: jax.ShapeDtypeStruct,
    words: tuple,
    layout: Layout | None,
) -> jax.Array:
    """Makes a (stacked) leaf; each device's piece is read where it lies in the files."""
    stack = rule.stack(cfg)
    views = {i: rule.to_ours(tensors[rule.name(i)], cfg) for i in np.ndindex(stack)}

    def piece(wanted: Any) -> np.ndarray:
        index = tuple(slice(*s.indices(n)) for s, n in zip(wanted, like.shape, strict=True))
        shape = [s.stop - s.start for s in index]
        out = np.zeros(shape, np.float32)  # rows that pad the vocabulary stay 0
        outer, inner = index[: len(stack)], index[len(stack) :]
        for place in np.ndindex(*shape[: len(stack)]):
            part = views[tuple(s.start + k for s, k in zip(outer, place, strict=True))][inner]
            out[(*place, *(slice(0, n) for n in part.shape))] = part
        return out

    if layout is None:
        sharding: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
        sharding = layout.named(layout.stored(*words))
    return jax.make_array_from_callback(like.shape, sharding, piece)


def save(
    params: Tree,
    cfg: DecoderConfig,
    path: str | Path,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | Path | None = None,
) -> None:
    """Writes a folder that transformers, and `load`, can read.

    Args: dtype: float32 (exact), bfloat16 or float16. tokenizer: folder or tokenizer.json to copy.
    Raises: UserError when no family has this shape, the folder exists, or storage fails.
    """
    if dtype not in CODES:
        raise UserError(f"dtype={dtype} must be one of {', '.join(CODES)} (--dtype)")
    target = Path(path).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder")
    leaves = dict(named_leaves(params))
    groups: dict[str, list[names.Rule]] = {}
    for rule in names.rules(cfg):
        groups.setdefault(rule.theirs, []).append(rule)
    wanted = {}
    for rules in groups.values():
        for index in np.ndindex(rules[0].stack(cfg)):
            wanted[rules[0].name(index)] = (rules, index)

    def produce(name: str) -> np.ndarray:
        rules, index = wanted[name]
        pieces = [_fetch(leaves[r.ours], index) for r in rules]
        return _join(rules, pieces, cfg)

    tensors = {n: (rules[0].their_shape(cfg), CODES[dtype]) for n, (rules, _) in wanted.items()}
    if jax.process_index() != 0:  # every process takes part in fetching; one writes
        for name in tensors:
            produce(name)
        return
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        write_folder(temporary, tensors, produce, shard_bytes)
        text = json.dumps(names.to_hf_config(cfg, dtype), indent=2) + "\n"
        (temporary / "config.json").write_text(text)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, temporary)
        temporary.chmod(0o755)
        if target.is_dir():
            target.rmdir()
        temporary.rename(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; nothing was left") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _fetch(x: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Returns one piece of a stacked leaf, all of it, on this host."""
    if index and isinstance(x.sharding, NamedSharding):
        rest = x.sharding.update(spec=PartitionSpec(*x.sharding.spec[len(index) :]))
        x = x.at[index].get(out_sharding=rest)  # the experts' dimension may be cut
    elif index:
        x = x[index]
    if not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def _join(rules: list[names.Rule], pieces: list[np.ndarray], cfg: DecoderConfig) -> np.ndarray:
    """Returns their tensor from ours: transposed, fused if they fuse, without padding rows."""
    views = [r.to_theirs(p) for r, p in zip(rules, pieces, strict=True)]
    theirs = rules[0].dims.split("->")[0]
    if rules[0].part is not None:
        joined = np.stack(views, theirs.index("3"))
    else:
        joined = views[0]
        if "V" in theirs:
            joined = joined[tuple(slice(cfg.vocab if c == "V" else None) for c in theirs)]
    return joined.reshape(rules[0].their_shape(cfg))


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Copies a tokenizer.json (or the one in a folder) and the settings beside it; keeps what is
    there already."""
    source = Path(source).expanduser()
    files = {"tokenizer.json": source} if source.is_file() else {}
    home = source.parent if source.is_file() else source
    files = {name: home / name for name in TOKENIZER_FILES} | files
    for name, file in files.items():
        if file.is_file() and not (folder / name).exists():
            shutil.copyfile(file, folder / name)
