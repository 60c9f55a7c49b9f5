"""Hugging Face folders in and out, without torch, leaf by leaf.

Import makes every device's piece of a leaf straight from the memory-mapped files: the host never
holds a whole leaf, let alone a model. Export streams the other way, one tensor at a time, and the
folder appears under its name only when it is whole. What it needs to know of the families is in
models/names.py, models/encoder_names.py and models/vlm_names.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from megajax.core import config as config_
from megajax.core import files as files_
from megajax.core.errors import UserError
from megajax.core.files import expand, model_folder
from megajax.core.layout import Layout
from megajax.core.tree import Tree, named_leaves, nest
from megajax.data.tokenizer import Tokenizer
from megajax.foreign import companions, mxfp4
from megajax.foreign.safetensors import (
    INDEX,
    SHARD_BYTES,
    SINGLE,
    TensorFolder,
    write_folder,
)
from megajax.foreign.torch_files import BIN, TorchFolder
from megajax.models import encoder_names, names, vlm_names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.hf_members import check_members
from megajax.models.names import Rule, Sizes
from megajax.models.networks import names_of, network_of
from megajax.models.parts import ModelParts, map_words
from megajax.models.vlm import VlmConfig
from megajax.parallel import exchange

ModelConfig = DecoderConfig | EncoderConfig | VlmConfig
Weights = TensorFolder | TorchFolder
FAMILIES = (*get_args(names.Family), *encoder_names.FAMILIES, *vlm_names.FAMILIES)
MAX_CONFIG = 2**24  # (chosen) bytes of a config.json
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")  # of PEFT
COMPARED_ROWS = 4096  # (chosen) rows of a table that are in memory as float32 at a time


def load_config(path: str | Path, flag: str = "init_from") -> ModelConfig:
    """Reads the config.json of a folder, or of ORG/NAME. flag: which named it.

    Raises: UserError when it is missing or not supported.
    """
    folder = model_folder(path, flag)
    if adapters := [name for name in ADAPTERS if (folder / name).exists()]:
        raise UserError(
            f"{folder} has an adapter ({', '.join(adapters)}), which --{flag} does not read; name "
            f"the folder of the weights (--{flag}), and the adapter's where a program has the flag "
            "--adapter, or merge it into the weights (peft: merge_and_unload)"
        )
    file = folder / "config.json"
    members = files_.read_object(file, MAX_CONFIG, flag)
    try:
        if members.get("model_type") in vlm_names.FAMILIES:
            processor = folder / vlm_names.PROCESSOR
            stated = files_.read_object(processor, MAX_CONFIG) if processor.is_file() else None
            return vlm_names.from_hf_config(members, stated)
        kind = check_members(members, FAMILIES)["model_type"]
        maps: Any = encoder_names if kind in encoder_names.FAMILIES else names
        return maps.from_hf_config(members)
    except KeyError as error:
        raise UserError(f"{file} lacks {error} (--{flag})") from None
    except UserError as error:
        reason = str(error).removeprefix("config.json").removeprefix(":").strip()
        raise UserError(f"{file}: {reason} (--{flag})") from None


def load_labels(path: str | Path, flag: str = "init_from") -> tuple[str, ...]:
    """Returns the names of the classes of a folder's classifier, as encoder_names.label_names."""
    file = model_folder(path, flag) / "config.json"
    try:
        return encoder_names.label_names(files_.read_object(file, MAX_CONFIG, flag))
    except UserError as error:
        reason = str(error).removeprefix("config.json").removeprefix(":").strip()
        raise UserError(f"{file}: {reason} (--{flag})") from None


def load_decoder_config(path: str | Path, flag: str = "init_from") -> DecoderConfig:
    """Reads config.json for a program that runs decoders only; else a UserError, as load_config."""
    cfg = load_config(path, flag)
    if not isinstance(cfg, DecoderConfig):
        kind = "an encoder" if isinstance(cfg, EncoderConfig) else "a vision-language model"
        raise UserError(
            f"{path} holds {kind} ({names_of(cfg).family(cfg)}); this program runs decoders: "
            f"{', '.join(get_args(names.Family))} (--{flag})"
        )
    return cfg


def load(path: str | Path, layout: Layout | None = None) -> tuple[ModelConfig, Tree]:
    """Returns (configuration, float32 parameters as `layout` stores them).

    layout: None: whole on the first device.
    Raises: UserError for a folder that is incomplete, damaged or of an unknown family.
    """
    cfg = load_config(path)
    return cfg, load_params(path, cfg, layout)


def load_params(path: str | Path, cfg: ModelConfig, layout: Layout | None = None) -> Tree:
    """Returns the parameters of a folder for a configuration that must have its shapes.

    What does not change shapes may differ from the folder's: dropout, window, the padding of the
    vocabulary.
    """
    theirs = load_config(path)
    if type(theirs) is not type(cfg):
        raise UserError(f"{path} has a {type(theirs).__name__}, not a {type(cfg).__name__}")
    maps, network = names_of(cfg), network_of(cfg)
    free = maps.free(cfg)
    shaping = [
        f"{name} is {old} there, {new} here"
        for name, old, new in config_.diff(cfg, theirs)
        if name not in free
    ]
    if shaping:
        raise UserError(f"{path} has another model: {'; '.join(shaping)} (--init_from)")
    folder = model_folder(path, "init_from")
    files = open_weights(folder)
    settings = files_.read_object(folder / "config.json", MAX_CONFIG)
    quantization = settings.get("quantization_config")
    if is_mxfp4(quantization):
        if not isinstance(theirs, DecoderConfig) or names.family(theirs) != "gpt_oss":
            raise UserError(f"{path}: experts in MXFP4 are read of gpt_oss alone (--init_from)")
    elif quantization or any(n.endswith(".qweight") for n in files.names()):
        raise UserError(
            f"{path} is quantized (quantization_config); only what runs a model reads it "
            "(scripts/serve.py, scripts/generate.py: foreign.hf_quantized.load)"
        )
    rules, sizes = maps.rules(theirs), maps.sizes(theirs)
    if isinstance(theirs, DecoderConfig):
        rules = names.as_stored(rules, set(files.names()))
    tensors = _find_tensors(files, rules, theirs)

    def read(rule: Rule, index: tuple[int, ...], inner: tuple[slice, ...]) -> np.ndarray:
        tensor = tensors[rule.name(index)]
        if isinstance(tensor, mxfp4.Packed):
            return tensor.part(inner, (0, 1) if rule.part is None else (rule.part, 2))
        return rule.to_ours(tensor, sizes)[inner]

    return make_params(network.parts(cfg), rules, sizes, read, layout)


def is_mxfp4(quantization: Any) -> bool:
    """Tells whether a quantization_config says that experts are in MXFP4, which `load_params`
    dequantizes."""
    return isinstance(quantization, dict) and quantization.get("quant_method") == mxfp4.METHOD


def open_weights(folder: Path) -> Weights:
    """Returns the tensors of a folder: safetensors, else pytorch_model.bin, as transformers does.

    Raises: UserError when there are none, or a file is damaged. No pickle is run.
    """
    safe = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    torch = (folder / BIN).is_file() or (folder / f"{BIN}.index.json").is_file()
    return TorchFolder(folder) if torch and not safe else TensorFolder(folder)


def make_params(
    parts: ModelParts,
    rules: list[Rule],
    sizes: Sizes,
    read: Callable[[Rule, tuple[int, ...], tuple[slice, ...]], np.ndarray],
    layout: Layout | None,
    *,
    dtype: Any = "float32",
    ready: Mapping[str, Any] | None = None,
) -> Tree:
    """Returns a network's parameters, every device's piece of a leaf made by itself.

    Args: parts: for shapes and words; no mesh is needed. rules: one for each leaf. read(rule,
      index, inner): the part `inner`, in our order of dimensions, of the tensor `rule.name(index)`.
      dtype: of matrices and tables; vectors and routers are float32. ready: leaves that are there.
    """
    named, ready = {rule.ours: rule for rule in rules}, ready or {}
    leaves = {
        name: ready[name]
        if name in ready
        else _make_leaf(
            named[name],
            read,
            sizes,
            like,
            words,
            layout,
            dtype if exchange.is_quantized(words) else "float32",
        )
        for (name, like), words in zip(
            named_leaves(parts.abstract), _leaf_words(parts.axes), strict=True
        )
    }
    return nest(leaves)


def _leaf_words(axes: Tree) -> list[tuple]:
    words: list[tuple] = []
    map_words(words.append, axes)
    return words


def _find_tensors(
    files: Weights, rules: list[Rule], cfg: ModelConfig
) -> dict[str, np.ndarray | mxfp4.Packed]:
    """Returns views of all tensors that the rules name; refuses strangers and wrong shapes."""
    maps = names_of(cfg)
    sizes = maps.sizes(cfg)
    views: dict[str, np.ndarray | mxfp4.Packed] = {}
    used = set()
    for rule in rules:
        for index in np.ndindex(rule.stack(sizes)):
            name = rule.name(index)
            stored = next((n for n in maps.spellings(name) if n in files), name)
            halves = [stored + end for end in (mxfp4.BLOCKS, mxfp4.SCALES)]
            if stored not in files and halves[0] in files:
                packed = mxfp4.Packed(stored, *map(files.view, halves))
                packed.check(rule.their_shape(sizes))
                views[name] = packed
                used.update(halves)
                continue
            views[name] = files.view(stored)
            check_tensor(files, stored, rule.their_shape(sizes))
            used.add(stored)
    used |= equal_copies(files, cfg)
    if isinstance(cfg, DecoderConfig):
        more = sorted(n for n in files.names() if names.predicts_more(n, cfg))
        if more:
            logging.warning(
                "%s: %d tensors of layers that predict further tokens are not read (%s, ...)",
                files.folder,
                len(more),
                more[0],
            )
    strangers = [n for n in files.names() if n not in used and not maps.is_needless(n, cfg)]
    if strangers:
        raise UserError(
            f"{files.folder} has tensors that this family does not know: "
            f"{', '.join(strangers[:5])}; the model would not use them"
        )
    return views


def equal_copies(files: Weights, cfg: ModelConfig) -> set[str]:
    """Returns the names of stored tensors that are copies of tied ones.

    Raises: UserError for one that differs: transformers uses it then, against config.json.
    """
    maps = names_of(cfg)
    copies = {n: original for n, original in maps.copies(cfg).items() if n in files}
    for name, original in copies.items():
        stored = next((n for n in maps.spellings(original) if n in files), original)
        a, b = files.view(name), files.view(stored)
        starts = range(0, len(a) if a.shape else 0, COMPARED_ROWS)
        blocks = (slice(i, i + COMPARED_ROWS) for i in starts)
        if a.shape != b.shape or not all(
            np.array_equal(a[s].astype(np.float32), b[s].astype(np.float32), equal_nan=True)
            for s in blocks
        ):
            raise UserError(
                f"{files.folder}: {name} differs from {stored}, and config.json ties the two "
                "(tie_word_embeddings, which is true in this family unless it says false). "
                "transformers uses both; so does this program for a decoder whose config.json has "
                '"tie_word_embeddings": false. Write that, or remove the tensor'
            )
    return set(copies)


def check_tensor(files: Weights, name: str, expected: tuple[int, ...]) -> None:
    """Raises: UserError for a tensor of another shape, or of integers."""
    shape, dtype = files.kind(name)
    if shape != expected:
        raise UserError(f"{files.folder}: {name} has shape {shape}, config.json says {expected}")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(f"{files.folder}: {name} is {dtype}; weights are of a floating type")


def _make_leaf(
    rule: Rule,
    read: Callable[[Rule, tuple[int, ...], tuple[slice, ...]], np.ndarray],
    sizes: Sizes,
    like: jax.ShapeDtypeStruct,
    words: tuple,
    layout: Layout | None,
    dtype: Any,
) -> jax.Array:
    """Makes a (stacked) leaf; each device's piece is read where it lies in the files."""
    stack = rule.stack(sizes)

    def piece(region: Any) -> np.ndarray:
        index = tuple(slice(*s.indices(n)) for s, n in zip(region, like.shape, strict=True))
        shape = [s.stop - s.start for s in index]
        out = np.zeros(shape, jnp.dtype(dtype))  # rows that pad a table stay 0
        outer, inner = index[: len(stack)], index[len(stack) :]
        for place in np.ndindex(*shape[: len(stack)]):
            there = tuple(s.start + k for s, k in zip(outer, place, strict=True))
            part = read(rule, there, inner)
            out[(*place, *(slice(0, n) for n in part.shape))] = part
        return out

    if layout is None:
        sharding: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
        sharding = layout.named(layout.stored(*words))
    return jax.make_array_from_callback(like.shape, sharding, piece)


def save(
    params: Tree,
    cfg: ModelConfig,
    path: str | Path,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | Path | Tokenizer | None = None,
    licences: Sequence[Path] = (),
    labels: Sequence[str] | None = None,
) -> None:
    """Writes a folder that transformers, and `load`, can read.

    Args: dtype: float32 (exact), bfloat16 or float16. tokenizer: itself, its folder or
      file, or 'bytes'; its ids go into config.json and generation_config.json too. licences: files
      to put beside the weights. labels: the names of a classifier's classes; None: LABEL_0, ...
    Raises: UserError when no family has this shape, the folder exists, or storage fails.
    """
    if dtype not in CODES:
        raise UserError(f"dtype={dtype} must be one of {', '.join(CODES)} (--dtype)")
    leaves, maps = dict(named_leaves(params)), names_of(cfg)
    rules = maps.rules(cfg)
    if other := sorted({r.ours for r in rules} ^ leaves.keys()):
        raise UserError(f"the parameters are not this configuration's: {', '.join(other[:5])}")
    tensors, produce = tensors_of(leaves, rules, cfg, dtype)
    named = {} if labels is None else {"labels": labels}
    members = maps.to_hf_config(cfg, dtype, **named)
    extra = maps.files(cfg) if isinstance(cfg, VlmConfig) else {}
    write(path, tensors, produce, members, shard_bytes, tokenizer, licences, extra)


Tensors = dict[str, tuple[tuple[int, ...], str]]  # {name: (shape, safetensors' name of the type)}


def tensors_of(
    leaves: Mapping[str, Any], model_rules: list[Rule], cfg: ModelConfig, dtype: str
) -> tuple[Tensors, Callable[[str], np.ndarray]]:
    """Returns the tensors that the rules make of the leaves: {name: (shape, type)}, and a function
    that returns the tensor of a name."""
    sizes = names_of(cfg).sizes(cfg)
    groups: dict[str, list[Rule]] = {}
    for rule in model_rules:
        groups.setdefault(rule.theirs, []).append(rule)
    sources = {}
    for rules in groups.values():
        for index in np.ndindex(rules[0].stack(sizes)):
            sources[rules[0].name(index)] = (rules, index)

    def produce(name: str) -> np.ndarray:
        rules, index = sources[name]
        pieces = [_fetch(leaves[r.ours], index) for r in rules]
        return join(rules, pieces, sizes)

    tensors = {n: (rules[0].their_shape(sizes), CODES[dtype]) for n, (rules, _) in sources.items()}
    return tensors, produce


def free_folder(path: str | Path) -> Path:
    """Returns the path of a folder to be written. Raises: UserError if it exists with content."""
    target = expand(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder")
    return target


def write(
    path: str | Path,
    tensors: Tensors,
    produce: Callable[[str], np.ndarray],
    members: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | Path | Tokenizer | None = None,
    licences: Sequence[Path] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes tensors, config.json (`members`) and a tokenizer as a folder, whole or not at all.

    extra: {name of a further file: the JSON in it}.
    Raises: UserError when the folder exists or storage fails.
    """
    target = free_folder(path)
    words = None if tokenizer is None else companions.find_tokenizer(tokenizer)
    families = (*get_args(names.Family), *vlm_names.FAMILIES)
    generates = members.get("model_type") in families
    if words is not None and generates:
        members = companions.special_ids(words) | dict(members)
    members = dict(members) | {"dtype": members["torch_dtype"]}  # transformers 5's name for it
    if jax.process_index() != 0:  # every process takes part in fetching; one writes
        for name in tensors:
            produce(name)
        return
    with files_.new_folder(target) as folder:
        write_folder(folder, tensors, produce, shard_bytes)
        for name, content in ({"config.json": members} | dict(extra or {})).items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        if words is not None:
            companions.write(words, folder, _positions(members), generates)
        companions.copy_files(licences, folder)


def _positions(members: Mapping[str, Any]) -> int:
    """Returns the most tokens of a text, of a config.json."""
    return members.get("max_position_embeddings") or members["n_positions"]


def _fetch(x: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Returns one piece of a stacked leaf, all of it, on this host."""
    if index and isinstance(x.sharding, NamedSharding):
        sharding = x.sharding.update(spec=PartitionSpec(*x.sharding.spec[len(index) :]))
        x = x.at[index].get(out_sharding=sharding)  # the experts' dimension may be cut
    elif index:
        x = x[index]
    if not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def join(rules: list[Rule], pieces: list[np.ndarray], sizes: Sizes) -> np.ndarray:
    """Returns the tensor of a file from a piece of our leaf for each rule: transposed, fused if
    several rules name the tensor, without padding rows."""
    views = [r.to_theirs(p) for r, p in zip(rules, pieces, strict=True)]
    theirs = rules[0].dims.split("->")[0]
    if rules[0].rows:
        ordered = sorted(zip(rules, views, strict=True), key=lambda pair: pair[0].part or 0)
        joined = np.concatenate([v.reshape(-1, v.shape[-1]) for _, v in ordered])
    elif rules[0].part is not None:
        joined = np.stack(views, theirs.index(rules[0].fused))
    else:
        joined = views[0][tuple(slice(sizes[c]) for c in theirs)]
    return joined.reshape(rules[0].their_shape(sizes))
