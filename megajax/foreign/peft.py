"""Adapters in the folders of PEFT (Hugging Face), without torch.

A folder has adapter_config.json and adapter_model.safetensors, whose tensors are lora_A (R, K) and
lora_B (N, R) of each module, for y = W x + scale B A x. What changes the arithmetic and is not done
here (DoRA, biases, ranks of single modules, copies of modules) is refused by name, and so is a
tensor that no module of the model has. PEFT loads what `save` writes.

Legend: R rank, K inputs and N outputs of a matrix, L layers.
"""

import json
import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from megajax.core import files as files_
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.packed import LowRank, PackedWeight
from megajax.core.tree import Tree, is_words, named_leaves
from megajax.foreign.hf import free_folder
from megajax.foreign.safetensors import TensorFolder, write_folder
from megajax.models import lora, names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.lora import LoraConfig

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG = 2**22  # (chosen) bytes of an adapter_config.json
MOST_RANK = 2**14  # (chosen: ten times the widest adapters)
# Members that have no part in what a loaded adapter computes.
INERT = frozenset(
    "task_type auto_mapping base_model_name_or_path revision inference_mode peft_version "
    "lora_dropout target_modules exclude_modules layers_pattern megatron_config megatron_core "
    "runtime_config loftq_config eva_config corda_config lora_ga_config qalora_group_size "
    "ensure_weight_tying _custom_modules".split()
)
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "layers_to_transform", "init_lora_weights"}
# Ways to draw A and B that leave the weights under them alone.
INITS = (True, False, None, "gaussian", "orthogonal", "eva")
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def modules() -> dict[str, str]:
    """Returns {our leaf: the module of a layer that has its matrix, with '{i}' for the layer}."""
    rules = names.rules(DecoderConfig(norm="rms", position="rope", activation="swiglu"))
    return {
        rule.ours: rule.theirs.removesuffix(".weight")
        for rule in rules
        if rule.ours.endswith(tuple(f".{leaf}" for leaf in lora.LEAVES.values()))
    }


# ---- in


def load(path: str | Path, params: Tree, axes: Tree) -> Tree:
    """Returns the parameters with the adapters of a folder.

    params, axes: of the model that they were trained for, as in ModelParts; adapters that they have
    are left out. The new leaves are float32 and lie as the matrices that they belong to.
    Raises: UserError for a folder that is incomplete, damaged, of another kind of adapters or of
      another model.
    """
    folder = expand(path)
    cfg = read_config(folder)
    if not (folder / TENSORS).is_file() and (folder / PICKLED).is_file():
        raise UserError(
            f"{folder} has {PICKLED} and no {TENSORS}; save it again with PEFT's "
            "save_pretrained(..., safe_serialization=True)"
        )
    files = TensorFolder(folder, TENSORS, alone=True)
    params = lora.strip(params)
    words = _dense_words(axes)
    structure = jax.tree.structure(words, is_leaf=is_words)
    named = dict(named_leaves(words, is_words))
    leaves = dict(zip(named, structure.flatten_up_to(params), strict=True))
    by_leaf: dict[str, dict[tuple[int, str], str]] = {}
    homes = {module: ours for ours, module in modules().items()}
    for tensor in files.names():
        ours, layer, letter = _place(folder, tensor, homes, named, leaves)
        by_leaf.setdefault(ours, {})[layer, letter] = tensor
    if not by_leaf:
        raise UserError(f"{folder}: {TENSORS} has no tensors")
    for ours, tensors in by_leaf.items():
        leaves[ours] = _adapter(files, cfg, ours, leaves[ours], named[ours], tensors)
    return structure.unflatten(leaves[name] for name in named)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the members of adapter_config.json that are read, and `scale`.

    Raises: UserError for a member that may change what the adapter computes and is not read here.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"{folder} has no {CONFIG}, so it is no adapter of PEFT (--adapter)")
    members = files_.read_object(file, MAX_CONFIG, "adapter")

    def refuse(name: str, rule: str) -> UserError:
        return UserError(f"{file}: {name}={reprlib.repr(members.get(name)):.80} {rule}")

    if members.get("peft_type") != "LORA":
        raise refuse("peft_type", "is not supported, only LORA")
    if members.get("task_type") not in (None, "CAUSAL_LM"):
        raise refuse("task_type", "is not supported, only CAUSAL_LM")
    rank, alpha = members.get("r"), members.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise refuse("r", f"must be a whole number in [1, {MOST_RANK}]")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not 0 < alpha < 1e30:
        raise refuse("lora_alpha", "must be a finite number above 0")
    if not isinstance(members.get("use_rslora", False), bool):
        raise refuse("use_rslora", "must be true or false")
    init = members.get("init_lora_weights", True)
    if not isinstance(init, bool | str | None) or init not in INITS:
        raise refuse(
            "init_lora_weights",
            "is not supported: it changes the weights under the adapter when it is loaded; convert "
            "the adapter with PEFT (save_pretrained(path_initial_model_for_weight_conversion=...))",
        )
    layers = members.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers
    if layers is not None and not (
        isinstance(layers, list) and layers and all(type(n) is int and n >= 0 for n in layers)
    ):
        raise refuse("layers_to_transform", "must be a number of a layer, or a list of them")
    for name, value in members.items():
        neutral = value in (None, False, "none", [], {})
        if name not in INERT | READ and not neutral:
            raise refuse(name, "is not supported; PEFT's default is")
    scale = alpha / (math.sqrt(rank) if members.get("use_rslora") else rank)
    return {"rank": rank, "scale": float(scale), "layers": layers}


def _place(
    folder: Path,
    tensor: str,
    homes: Mapping[str, str],
    words: Mapping[str, Any],
    leaves: Mapping[str, Any],
) -> tuple[str, int, str]:
    """Returns (our leaf, layer, 'A' or 'B') of a tensor. Raises: UserError for another one."""
    matched = NAME.fullmatch(tensor)
    parts = matched[1].split(".") if matched else []
    numbers = [part for part in parts if part.isascii() and part.isdigit() and len(part) < 6]
    module = ".".join("{i}" if part in numbers else part for part in parts)
    ours = homes.get(module, "")
    if matched is None or len(numbers) != 1 or not ours:
        raise UserError(
            f"{folder}: {TENSORS} has {tensor[:200]!r}, and adapters are read of "
            f"base_model.model.MODULE.lora_A.weight (and lora_B) with MODULE one of "
            f"{', '.join(homes)}"
        )
    layers = jax.tree.leaves(leaves[ours])[0].shape[0] if ours in words else 0
    if ours not in words or int(numbers[0]) >= layers:
        why = f"it has {layers} layers" if ours in words else f"it has no {ours}"
        raise UserError(
            f"{folder}: {TENSORS} has {tensor[:200]}, which the model has not ({why}); these "
            "adapters were trained for another model"
        )
    return ours, int(numbers[0]), matched[2]


def _adapter(
    files: TensorFolder,
    cfg: Mapping[str, Any],
    ours: str,
    base: Any,
    words: tuple,
    tensors: Mapping[tuple[int, str], str],
) -> LowRank:
    """Returns one stacked leaf with its adapter; layers without one have A = B = 0."""
    layers, *shape = lora.dense_shape(base, words)
    inputs = 1 if words[1] == "embed" else len(shape) - 1
    K, N, R = math.prod(shape[:inputs]), math.prod(shape[inputs:]), cfg["rank"]
    a_LKR = np.zeros((layers, K, R), np.float32)
    b_LRN = np.zeros((layers, R, N), np.float32)
    stated = range(layers) if cfg["layers"] is None else cfg["layers"]
    for layer in sorted({*stated, *(layer for layer, _ in tensors)}):
        for letter, target, expected in (("A", a_LKR, (R, K)), ("B", b_LRN, (N, R))):
            if (layer, letter) not in tensors:
                raise UserError(
                    f"{files.folder}: {TENSORS} has no lora_{letter} of {ours}, layer {layer}, and "
                    f"{CONFIG} names that layer (layers_to_transform)"
                )
            name = tensors[layer, letter]
            kind, dtype = files.kind(name)
            if kind != expected or not jnp.issubdtype(dtype, jnp.floating):
                raise UserError(
                    f"{files.folder}: {name} is {dtype} of the shape {list(kind)}; the model and r="
                    f"{R} make it floating, {list(expected)}"
                )
            target[layer] = files.view(name).astype(np.float32).T
    a = a_LKR.reshape(layers, *shape[:inputs], R)
    b = b_LRN.reshape(layers, R, *shape[inputs:])
    lies: list[Any] = [None] * (1 + len(shape))
    mesh = None
    if isinstance(sharding := getattr(jax.tree.leaves(base)[0], "sharding", None), NamedSharding):
        mesh = sharding.mesh
        if not isinstance(base, PackedWeight):
            lies = [*sharding.spec, *lies[len(sharding.spec) :]]
    specs = (*lies[: inputs + 1], None), (lies[0], None, *lies[inputs + 1 :])
    a, b = (_put(x, mesh, spec) for x, spec in zip((a, b), specs, strict=True))
    return LowRank(base, a, b, cfg["scale"])


def _put(x: np.ndarray, mesh: Any, spec: tuple) -> jax.Array:
    if mesh is None:
        return jnp.asarray(x)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def _dense_words(axes: Tree) -> Tree:
    """Returns the words of the model without adapters."""

    def dense(w: Any) -> Any:
        if not lora.is_low_rank(w):
            return w
        n = w.a.count("layers")
        return (*w.a[:-1], *w.b[n + 1 :])

    return jax.tree.map(dense, axes, is_leaf=lambda x: is_words(x) or lora.is_low_rank(x))


# ---- out


def save(
    params: Tree,
    cfg: LoraConfig | DecoderConfig | None,
    path: str | Path,
    base: str | None = None,
) -> None:
    """Writes the adapters of the parameters as a folder that PEFT loads.

    cfg: with which they were made; a rank or a factor that is not theirs is refused. None, or the
    model's: nothing is compared. base: name of the model under them, for PEFT's AutoPeftModel.
    Raises: UserError for parameters without adapters, for modules that PEFT's names do not have,
      for adapters of unlike ranks or factors, and when the folder exists or storage fails.
    """
    target, ours = free_folder(path), lora.adapters(params)
    homes = modules()
    if not ours:
        raise UserError(
            "the parameters have no adapters, so there is no PEFT folder to write (--adapters)"
        )
    if strange := [n for n in ours if n not in homes]:
        raise UserError(
            f"{strange[0]} has an adapter and no name in PEFT's folders; these have: "
            f"{', '.join(homes)}"
        )
    if "positions" in params:  # of GPT-2; the other families have rotary positions
        raise UserError(
            "a GPT-2's adapters are of q, k and v, and its PEFT folders have one fused matrix of "
            "them: merge the adapters into the weights (megajax.models.lora.merge)"
        )
    kinds = {(w.a.shape[-1], w.scale) for w in ours.values()}
    if len(kinds) > 1:
        raise UserError(f"the adapters have several ranks or factors: {sorted(kinds)}")
    [(rank, scale)] = kinds
    if isinstance(cfg, LoraConfig) and (cfg.rank != rank or not math.isclose(cfg.scale, scale)):
        raise UserError(
            f"lora.rank={cfg.rank}, lora.alpha={cfg.alpha:g}: the adapters have the rank {rank} "
            f"and the factor {scale:g} (--lora.rank, --lora.alpha)"
        )
    arrays = {}
    for name, w in ours.items():
        a, b = _fetch(w.a), _fetch(w.b)
        for layer in range(len(a)):
            home = f"base_model.model.{homes[name].format(i=layer)}"
            arrays[f"{home}.lora_A.weight"] = a[layer].reshape(-1, rank).T
            arrays[f"{home}.lora_B.weight"] = b[layer].reshape(rank, -1).T
    alpha = scale * rank
    members = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": round(alpha) if math.isclose(alpha, round(alpha)) else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({homes[name].split(".")[-1] for name in ours}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    if jax.process_index() != 0:
        return
    with files_.new_folder(target) as folder:
        tensors = {n: (x.shape, "F32") for n, x in arrays.items()}
        write_folder(folder, tensors, arrays.__getitem__, single=TENSORS)
        (folder / CONFIG).write_text(json.dumps(members, indent=2) + "\n")


def _fetch(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x, np.float32)
