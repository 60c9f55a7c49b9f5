"""Hugging Face name maps of vision-language models: Qwen2-VL.

The decoder's rules and members are those of qwen2 (models/names.py). Files name the tensors either
`visual.*` and `model.*`, as the release and transformers 5 do, or `model.visual.*` and
`model.language_model.*`, as transformers 4.52 and later did. A config.json has the members of the
text at its root, as the release has, or in `text_config`.

Legend: as names.py, and of the tower: d width, f feed-forward width, h heads, k head width, 3 the
fused q, k, v, n values of a patch of all frames (c channels, s frames, p rows, p columns), m = w
width of the patches that are merged.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.layers.mlp import ACTIVATIONS, Activation
from megajax.models import names
from megajax.models.hf_members import (
    INERT,
    MOST,
    check_kinds,
    check_members,
    require,
    spelled,
    table,
)
from megajax.models.names import Rule
from megajax.models.vit import MEAN, ROPE, STD, VitConfig
from megajax.models.vlm import VlmConfig

FAMILIES = ("qwen2_vl",)
TEXT, VISION = "qwen2_vl_text", "qwen2_vl_vision"
PROCESSOR = "preprocessor_config.json"  # says how images are resized
_KINDS: tuple[Activation, ...] = ("quick_gelu", "gelu", "gelu_tanh")  # that a tower may have
_BICUBIC = 3  # Pillow's number of it
_NORM_EPS = 1e-6  # of the tower, a constant in transformers


# ---- tensors


def sizes(cfg: VlmConfig) -> dict[str, int]:
    """Returns {letter of a rule's dims: size}; '{i}': the decoder's layers, '{t}': the tower's."""
    tower = cfg.tower
    return names.sizes(cfg.decoder) | {
        "{t}": tower.layers,
        "d": tower.width,
        "f": tower.mlp,
        "h": tower.heads,
        "k": tower.head_width,
        "n": tower.temporal * tower.patch_values,
        "c": tower.channels,
        "s": tower.temporal,
        "p": tower.patch,
        "m": tower.merged_width,
        "w": tower.merged_width,
    }


def rules(cfg: VlmConfig) -> list[Rule]:
    """Returns one rule for each leaf. Raises: UserError when no family has this shape."""
    family(cfg)
    layer, ours = "visual.blocks.{t}", "tower.blocks"
    mapped = [
        *names.rules(cfg.decoder),
        Rule("tower.embed", "visual.patch_embed.proj.weight", "dn->nd", their_dims="dcspp"),
    ]
    for part, name in enumerate(("query", "key", "value")):
        qkv = f"{layer}.attn.qkv"
        mapped += [
            Rule(f"{ours}.attention.{name}", f"{qkv}.weight", "3hkd->dhk", part),
            Rule(f"{ours}.attention.{name}_bias", f"{qkv}.bias", "3hk->hk", part),
        ]
    products = {
        f"{ours}.attention.out": (f"{layer}.attn.proj", "dhk->hkd"),
        f"{ours}.mlp.up": (f"{layer}.mlp.fc1", "fd->df"),
        f"{ours}.mlp.down": (f"{layer}.mlp.fc2", "df->fd"),
        "projector.up": ("visual.merger.mlp.0", "wm->mw"),
        "projector.down": ("visual.merger.mlp.2", "Dw->wD"),
    }
    for leaf, (theirs, dims) in products.items():
        out = dims[0]
        mapped += [
            Rule(leaf, f"{theirs}.weight", dims),
            Rule(f"{leaf}_bias", f"{theirs}.bias", f"{out}->{out}"),
        ]
    for leaf, theirs in (
        (f"{ours}.attention_norm", f"{layer}.norm1"),
        (f"{ours}.mlp_norm", f"{layer}.norm2"),
        ("projector.norm", "visual.merger.ln_q"),
    ):
        mapped += [
            Rule(f"{leaf}.scale", f"{theirs}.weight", "d->d"),
            Rule(f"{leaf}.shift", f"{theirs}.bias", "d->d"),
        ]
    return mapped


def spellings(name: str) -> tuple[str, ...]:
    """Returns how files may call a tensor: in both layouts, with or without the head."""
    if name.startswith("visual."):
        return name, f"model.{name}"
    body = name.removeprefix("model.")
    if body == name:
        return (name,)
    return name, f"model.language_model.{body}", f"language_model.{body}"


def is_needless(name: str, cfg: VlmConfig) -> bool:
    """Tells whether a tensor is a buffer that transformers does not load either."""
    return name.endswith((".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq"))


def copies(cfg: VlmConfig) -> dict[str, str]:
    """Returns {tensor that a file may hold again: the tied one that it must equal}."""
    return names.copies(cfg.decoder)


def free(cfg: VlmConfig) -> set[str]:
    """Returns the members that may differ from a folder whose weights are loaded."""
    limits = {"tower.min_pixels", "tower.max_pixels", "image_token"}
    return limits | {f"decoder.{name}" for name in names.free(cfg.decoder)}


def family(cfg: VlmConfig) -> str:
    """Returns the Hugging Face model type of this shape. Raises: UserError when there is none."""
    decoder, tower = cfg.decoder, cfg.tower
    lacking = {
        "a decoder of the family qwen2": names.family(decoder) == "qwen2",
        "model.heads x model.head_width = model.width": decoder.heads * decoder.head_width
        == decoder.width,
        "model.mrope": bool(cfg.sections),
        "no model.rope.factor": decoder.rope.factor == 1.0,
        f"tower.activation one of {', '.join(_KINDS)}": tower.activation in _KINDS,
        "tower.mlp a multiple of tower.width": tower.mlp % tower.width == 0,
        f"tower.norm_eps={_NORM_EPS}": tower.norm_eps == _NORM_EPS,
    }
    if missing := [name for name, is_there in lacking.items() if not is_there]:
        raise UserError(f"qwen2_vl cannot hold this model; it needs {', '.join(missing)}")
    return "qwen2_vl"


# ---- config.json


def from_hf_config(
    config: Mapping[str, Any], processor: Mapping[str, Any] | None = None
) -> VlmConfig:
    """Returns our configuration of a config.json.

    processor: what preprocessor_config.json holds, for the limits of an image's pixels; None: those
    of transformers. What it says of anything else must be what data/images.py does.
    Raises: UserError for what we cannot compute.
    """
    outer, text, vision = _parts(config)
    text, sections = _without_sections(check_members(text | {"model_type": TEXT}, (TEXT,)))
    theta = {"rope_theta": table()["families"][TEXT]["rope_theta"]}
    stated = {"sliding_window": None} | text
    if not any(n in (stated.get(m) or {}) for m in _ROTARY for n in theta):
        stated = theta | stated
    tied = {"tie_word_embeddings": outer["tie_word_embeddings"]}
    decoder = names.from_hf_config(stated | tied | {"model_type": "qwen2"})
    vision = check_members(vision | {"model_type": VISION}, (VISION,))
    require(vision, hidden_size=decoder.width)
    require(vision.get("rope_parameters", {}), rope_type="axial", rope_theta=ROPE.theta)
    width = vision["embed_dim"]
    _check_processor(processor or {}, vision)
    tower = VitConfig(
        layers=vision["depth"],
        width=width,
        heads=vision["num_heads"],
        mlp=vision["mlp_ratio"] * width,
        patch=vision["patch_size"],
        merge=vision["spatial_merge_size"],
        channels=vision["in_channels"],
        temporal=vision["temporal_patch_size"],
        norm_eps=_NORM_EPS,
        activation=spelled("hidden_act", vision["hidden_act"], _KINDS),
        **_pixels(processor or {}),
    )
    return VlmConfig(decoder, tower, outer["image_token_id"], ",".join(map(str, sections)))


_ROTARY = ("rope_parameters", "rope_scaling")


def _parts(config: Mapping[str, Any]) -> tuple[dict, dict, dict]:
    """Returns (members of the whole model, of its text, of its tower)."""
    check_kinds(config, ("model_type", "text_config", "vision_config"))
    outer = dict(config)
    nested, vision = (dict(outer.pop(n, None) or {}) for n in ("text_config", "vision_config"))
    flat = {*table()["families"][TEXT]["members"], *_ROTARY, "rope_theta"}
    text = {name: outer.pop(name) for name in flat & outer.keys()}
    if nested:
        for name, value in text.items():  # transformers reads the inner one alone
            if name not in INERT and nested.get(name, value) != value:
                raise UserError(
                    f"config.json: {name}={reprlib.repr(value):.40} and text_config.{name}="
                    f"{reprlib.repr(nested[name]):.40} are two words for one member; keep that of "
                    "text_config"
                )
        text = nested
    tied = text.pop("tie_word_embeddings", False)
    outer = check_members(outer, FAMILIES)
    outer["tie_word_embeddings"] = outer["tie_word_embeddings"] or tied
    for one in (text, vision):
        one.pop("model_type", None)
    return outer, text, vision


def _without_sections(text: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Returns the members of the text with rotary settings as qwen2 has them, and the pairs of
    rotary dimensions of each axis. Raises: UserError where they are not stated once."""
    stated = []
    for name in _ROTARY:
        if settings := dict(text.get(name) or {}):
            if (sections := settings.pop("mrope_section", None)) is not None:
                stated.append(sections)
            for kind in ("type", "rope_type"):
                if settings.get(kind) == "mrope":
                    settings[kind] = "default"
            text = text | {name: settings}
    if not stated or any(s != stated[0] for s in stated):
        raise UserError(
            "config.json: mrope_section must be stated once, in rope_parameters or rope_scaling"
        )
    sections = stated[0]
    is_list = isinstance(sections, list) and len(sections) == 3
    if not is_list or not all(type(n) is int and 0 <= n <= MOST for n in sections):
        raise UserError(
            f"config.json: mrope_section is {reprlib.repr(sections):.60}, it must be three whole "
            "numbers"
        )
    return text, sections


def _check_processor(processor: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Refuses an image processor that makes other pixels or patches of an image than ours.

    Raises: UserError.
    """
    does = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    required: dict[str, Any] = does | {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "resample": _BICUBIC,
        "rescale_factor": 1 / 255,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    for name, value in required.items():
        stated = processor.get(name)
        if stated is None:
            continue
        try:
            is_same = np.shape(stated) == np.shape(value) and np.allclose(stated, value, 1e-6, 0)
        except (TypeError, ValueError):
            is_same = False
        if not is_same:
            raise UserError(
                f"{PROCESSOR}: {name}={reprlib.repr(stated):.60} is not supported, only {value}"
            )


def _pixels(processor: Mapping[str, Any]) -> dict[str, int]:
    """Returns the limits of an image's pixels that a preprocessor_config.json states."""
    size = processor.get("size")
    size = size if isinstance(size, dict) else {}
    limits = {
        "min_pixels": processor.get("min_pixels", size.get("shortest_edge")),
        "max_pixels": processor.get("max_pixels", size.get("longest_edge")),
    }
    for name, value in limits.items():
        if value is not None and (type(value) is not int or not 1 <= value <= MOST):
            raise UserError(
                f"{PROCESSOR}: {name} is {reprlib.repr(value):.60}, it must be a whole number in "
                f"[1, {MOST}]"
            )
    return {name: value for name, value in limits.items() if value is not None}


def to_hf_config(cfg: VlmConfig, dtype: str) -> dict[str, Any]:
    """Returns the config.json that `from_hf_config` and transformers read, of the release's
    shape."""
    kind, tower = family(cfg), cfg.tower
    text = names.to_hf_config(cfg.decoder, dtype)
    for name in ("head_dim", "attention_bias"):  # which the family does not know
        text.pop(name)
    return text | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": kind,
        "rope_scaling": {"type": "mrope", "mrope_section": list(cfg.sections)},
        "image_token_id": cfg.image_token,
        "vision_config": {
            "model_type": kind,  # transformers 4 and 5 both read it so
            "depth": tower.layers,
            "embed_dim": tower.width,
            "hidden_size": cfg.width,
            "num_heads": tower.heads,
            "mlp_ratio": tower.mlp // tower.width,
            "patch_size": tower.patch,
            "spatial_merge_size": tower.merge,
            "temporal_patch_size": tower.temporal,
            "in_channels": tower.channels,
            "hidden_act": ACTIVATIONS[tower.activation].hugging_face[0],
        },
    }


def files(cfg: VlmConfig) -> dict[str, dict[str, Any]]:
    """Returns {name of a further file of a folder: the JSON in it}."""
    tower = cfg.tower
    return {
        PROCESSOR: {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": tower.min_pixels, "longest_edge": tower.max_pixels},
            "min_pixels": tower.min_pixels,
            "max_pixels": tower.max_pixels,
            "patch_size": tower.patch,
            "merge_size": tower.merge,
            "temporal_patch_size": tower.temporal,
        }
    }
