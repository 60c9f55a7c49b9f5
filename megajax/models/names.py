"""Hugging Face name maps: our leaves <-> their tensors, and our configuration <-> config.json.

Of the decoders; encoder_names.py has the encoders'. Families: gpt2, llama, mistral (llama with a
window), qwen2, qwen3, mixtral, qwen3_moe, gpt_oss, deepseek_v3, gemma3_text, olmo2, smollm3, phi3.

Legend: D width, F feed-forward (of one expert, where there are any), E experts, H query heads, G
key-value heads, K head width, V vocabulary, N positions, 3 the fused q, k, v of GPT-2, 2 the fused
gate and up of GPT-OSS. Of DeepSeek-V3: Q, R ranks of the latents, L latent with the rotary key, U
width of a head's values, W of its key without the rotary part and its values, Z, Y feed-forward
widths of the first layers and of the shared experts.
"""

import dataclasses
import re
from collections.abc import Container, Mapping
from typing import Any, Literal, get_args

import numpy as np

from megajax.core.errors import UserError
from megajax.layers.attention import RopeConfig, factors_of
from megajax.layers.latent import LatentConfig
from megajax.layers.mlp import ACTIVATIONS, LIMIT, STEEPNESS, Activation
from megajax.layers.moe import MoeConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.models.hf_members import (
    check_kinds,
    check_members,
    require,
    spelled,
    table,
)

# ---- rules
#
# A rule joins one leaf of ours with one tensor (or several) of Hugging Face: it says how the
# tensor's dimensions are read and in which order ours has them, letter by letter ('HKD->DHK': a
# torch Linear of q_proj). Both directions are views, so a shard of a leaf is read from the file
# without touching the others. encoder_names.py makes its rules of these too, with letters of its
# own.


Sizes = Mapping[str, int]  # {letter of a rule's dims: size}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One leaf and its tensor, or tensors: '{i}' in `theirs` is the layer, '{e}' the expert, '{t}'
    the layer of a tower, and our leaf is stacked over them. part: of a fused tensor's '3' or '2'.
    their_dims: of the tensor's shape, where `dims` reads several of its dimensions as one. first:
    the number that the leaf's first layer '{i}' has there. rows: of a tensor that holds the rows of
    several leaves: the letters of each part's rows; `part` says which one the leaf is."""

    ours: str
    theirs: str
    dims: str
    part: int | None = None
    their_dims: str = ""
    first: int = 0
    rows: tuple[str, ...] = ()

    def stack(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns how many tensors make the leaf, by leading dimension: (), (L,) or (L, E)."""
        return tuple(sizes["{" + mark + "}"] for mark in self._marks)

    def name(self, index: tuple[int, ...]) -> str:
        """Returns the name of one of the tensors."""
        numbers = dict(zip(self._marks, index, strict=True))
        if "i" in numbers:
            numbers["i"] += self.first
        return self.theirs.format(**numbers)

    @property
    def fused(self) -> str:
        """The letter of `dims` that counts the parts of a fused tensor."""
        return "2" if "2" in self.dims else "3"

    @property
    def _marks(self) -> list[str]:
        return [mark for mark in "iet" if "{" + mark + "}" in self.theirs]

    def their_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the tensor's shape: heads and head width are one dimension there."""
        if self.their_dims:
            return tuple(sizes[c] for c in self.their_dims)
        if self.rows:
            inputs = self.dims.split("->")[0][len(self.rows[0]) :]
            return (sum(self.row_counts(sizes)), *(sizes[c] for c in inputs))
        merged = self.dims.split("->")[0]
        for fused in ("3HK", "HK", "GK", "3hk", "hk", "HW", "HU", "F2"):
            if fused in merged:
                size = int(np.prod([sizes[c] for c in fused]))
                others = [sizes[c] for c in merged.replace(fused, "*") if c != "*"]
                return (size, *others) if merged.startswith(fused) else (*others, size)
        return tuple(sizes[c] for c in merged)

    def row_counts(self, sizes: Sizes) -> list[int]:
        """Returns the rows of each part of a tensor that holds several leaves."""
        return [int(np.prod([sizes[c] for c in part])) for part in self.rows]

    def to_ours(self, tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Returns their tensor as a view in our shape (of one layer, of one expert)."""
        theirs, ours = self.dims.split("->")
        if self.rows and self.part is not None:
            counts = self.row_counts(sizes)
            first = sum(counts[: self.part])
            tensor = tensor[first : first + counts[self.part]]
        view = tensor.reshape([sizes[c] for c in theirs])
        if self.part is not None and not self.rows:
            view = view[(slice(None),) * theirs.index(self.fused) + (self.part,)]
            theirs = theirs.replace(self.fused, "")
        return view.transpose([theirs.index(c) for c in ours])

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Returns one piece of our leaf with their order of dimensions (that of the parts left
        out)."""
        theirs, ours = self.dims.split("->")
        return array.transpose([ours.index(c) for c in theirs.replace(self.fused, "")])


# ---- tensors of the decoders


Family = Literal[
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "gemma3_text",
    "olmo2",
    "smollm3",
    "phi3",
]

# Buffers that older checkpoints carry: masks of GPT-2, the others' rotary frequencies.
BUFFERS = {"gpt2": (".attn.bias", ".attn.masked_bias")}
FREQUENCIES = (".rotary_emb.inv_freq",)

# Members of MoeConfig that a checkpoint knows nothing of.
TRAINED = ("mode", "capacity_factor", "share_slots", "aux_loss", "z_loss")


def sizes(cfg: DecoderConfig) -> dict[str, int]:
    """Returns {letter of a rule's dims: size}; '{i}': the layers, '{e}': the experts."""
    F = cfg.moe.width if cfg.moe.experts else cfg.mlp
    return {
        "{i}": cfg.layers,
        "{e}": cfg.moe.experts,
        "D": cfg.width,
        "F": F,
        "E": cfg.moe.experts,
        "H": cfg.heads,
        "G": cfg.kv_heads,
        "K": cfg.head_width,
        "V": cfg.vocab,
        "N": cfg.max_positions,
        "3": 3,
        "2": 2,
        "{t}": cfg.moe.dense_layers,
        "Z": cfg.moe.dense_width,
        "Y": cfg.moe.shared * cfg.moe.width,
        "Q": cfg.latent.query_rank or cfg.width,
        "R": cfg.latent.rank,
        "L": cfg.latent.rank + cfg.latent.rotary,
        "W": cfg.head_width - cfg.latent.rotary + cfg.latent.value,
        "U": cfg.latent.value,
    }


def _attention(prefix: str, bias: str, qk_norm: str | None) -> list[Rule]:
    mapped = []
    for ours, theirs, heads in (
        ("query", "q_proj", "H"),
        ("key", "k_proj", "G"),
        ("value", "v_proj", "G"),
    ):
        mapped.append(
            Rule(
                f"blocks.attention.{ours}",
                f"{prefix}.self_attn.{theirs}.weight",
                f"{heads}KD->D{heads}K",
            )
        )
        if bias != "none":
            mapped.append(
                Rule(
                    f"blocks.attention.{ours}_bias",
                    f"{prefix}.self_attn.{theirs}.bias",
                    f"{heads}K->{heads}K",
                )
            )
    mapped.append(Rule("blocks.attention.out", f"{prefix}.self_attn.o_proj.weight", "DHK->HKD"))
    if bias == "all":
        mapped.append(Rule("blocks.attention.out_bias", f"{prefix}.self_attn.o_proj.bias", "D->D"))
    if qk_norm:
        for ours, theirs, heads in (("query_norm", "q_norm", "H"), ("key_norm", "k_norm", "G")):
            name = f"{prefix}.self_attn.{theirs}.weight"
            dims = "K->K" if qk_norm == "head" else f"{heads}K->{heads}K"
            mapped.append(Rule(f"blocks.attention.{ours}.scale", name, dims))
    return mapped


FUSED = {  # of Phi-3: {our leaf: (their tensor, rows of its parts, which one)}
    "blocks.attention.query": ("self_attn.qkv_proj", ("HK", "GK", "GK"), 0),
    "blocks.attention.key": ("self_attn.qkv_proj", ("HK", "GK", "GK"), 1),
    "blocks.attention.value": ("self_attn.qkv_proj", ("HK", "GK", "GK"), 2),
    "blocks.mlp.gate": ("mlp.gate_up_proj", ("F", "F"), 0),
    "blocks.mlp.up": ("mlp.gate_up_proj", ("F", "F"), 1),
}


def fused(model_rules: list[Rule]) -> list[Rule]:
    """Returns the rules of a model without biases with Phi-3's joined matrices."""

    def of(rule: Rule) -> Rule:
        if rule.ours not in FUSED:
            return rule
        name, rows, part = FUSED[rule.ours]
        theirs = f"model.layers.{{i}}.{name}.weight"
        return dataclasses.replace(rule, theirs=theirs, rows=rows, part=part)

    return [of(rule) for rule in model_rules]


def as_stored(model_rules: list[Rule], stored: Container[str]) -> list[Rule]:
    """Returns the rules with joined matrices where a folder has them. stored: its tensors."""
    is_joined = any(n in stored for n in spellings("model.layers.0.self_attn.qkv_proj.weight"))
    return fused(model_rules) if is_joined else model_rules


def _norm_rules(cfg: DecoderConfig, layer: str) -> list[Rule]:
    """The norms of a layer: post_attention_layernorm is of the residual stream in Llama, and of
    attention's output where sublayers have norms after them."""
    if cfg.norms == "before":
        theirs = {"attention_norm": "input", "mlp_norm": "post_attention"}
    else:
        theirs = {"attention_after": "post_attention", "mlp_after": "post_feedforward"}
    if cfg.norms == "both":
        theirs |= {"attention_norm": "input", "mlp_norm": "pre_feedforward"}
    return [
        Rule(f"blocks.{ours}.scale", f"{layer}.{name}_layernorm.weight", "D->D")
        for ours, name in theirs.items()
    ]


def _llama_rules(cfg: DecoderConfig) -> list[Rule]:
    """Llama and its relatives: separate torch Linears, RMSNorm."""
    layer = "model.layers.{i}"
    mapped = [Rule("tokens", "model.embed_tokens.weight", "VD->VD")]
    mapped += _attention(layer, cfg.bias, cfg.qk_norm_over if cfg.qk_norm else None)
    ours, theirs, gate, up, down = "mlp", "mlp", "gate_proj", "up_proj", "down_proj"
    if cfg.moe.experts:
        ours, home = "moe", f"{layer}.mlp"
        if family(cfg) == "mixtral":
            home, gate, up, down = f"{layer}.block_sparse_moe", "w1", "w3", "w2"
        theirs = home.removeprefix(f"{layer}.") + ".experts.{e}"
        mapped.append(Rule("blocks.moe.router", f"{home}.gate.weight", "ED->DE"))
    mapped += [
        Rule(f"blocks.{ours}.gate", f"{layer}.{theirs}.{gate}.weight", "FD->DF"),
        Rule(f"blocks.{ours}.up", f"{layer}.{theirs}.{up}.weight", "FD->DF"),
        Rule(f"blocks.{ours}.down", f"{layer}.{theirs}.{down}.weight", "DF->FD"),
        *_norm_rules(cfg, layer),
        Rule("norm.scale", "model.norm.weight", "D->D"),
    ]
    if not cfg.tied:
        mapped.append(Rule("head", "lm_head.weight", "VD->DV"))
    return mapped


def _norms_and_ends(cfg: DecoderConfig, ours: str, layer: str, first: int = 0) -> list[Rule]:
    """The norms of a stack, and what is in no layer: as Llama has them."""
    mapped = [
        Rule("tokens", "model.embed_tokens.weight", "VD->VD"),
        Rule("norm.scale", "model.norm.weight", "D->D"),
        Rule("head", "lm_head.weight", "VD->DV"),
        Rule(
            f"{ours}.attention_norm.scale",
            f"{layer}.input_layernorm.weight",
            "D->D",
            None,
            "",
            first,
        ),
        Rule(
            f"{ours}.mlp_norm.scale",
            f"{layer}.post_attention_layernorm.weight",
            "D->D",
            None,
            "",
            first,
        ),
    ]
    return [rule for rule in mapped if rule.ours != "head" or not cfg.tied]


def _gpt_oss_rules(cfg: DecoderConfig) -> list[Rule]:
    """GPT-OSS: biases everywhere, sinks, experts stacked in one tensor a layer."""
    layer = "model.layers.{i}"
    mapped = _norms_and_ends(cfg, "blocks", layer) + _attention(layer, "all", None)
    mapped.append(Rule("blocks.attention.sinks", f"{layer}.self_attn.sinks", "H->H"))
    for ours, theirs, dims, part in (
        ("router", "router.weight", "ED->DE", None),
        ("router_bias", "router.bias", "E->E", None),
        ("gate", "experts.gate_up_proj", "EDF2->EDF", 0),
        ("up", "experts.gate_up_proj", "EDF2->EDF", 1),
        ("gate_bias", "experts.gate_up_proj_bias", "EF2->EF", 0),
        ("up_bias", "experts.gate_up_proj_bias", "EF2->EF", 1),
        ("down", "experts.down_proj", "EFD->EFD", None),
        ("down_bias", "experts.down_proj_bias", "ED->ED", None),
    ):
        mapped.append(Rule(f"blocks.moe.{ours}", f"{layer}.mlp.{theirs}", dims, part))
    return mapped


def _deepseek_rules(cfg: DecoderConfig) -> list[Rule]:
    """DeepSeek-V3: latent attention, dense first layers, then experts with a shared one."""
    first = cfg.moe.dense_layers
    mapped = _norms_and_ends(cfg, "blocks", "model.layers.{i}", first)
    stacks = [("blocks", "model.layers.{i}", first)]
    if first:
        mapped += _norms_and_ends(cfg, "dense", "model.layers.{t}")[-2:]
        stacks.append(("dense", "model.layers.{t}", 0))
    for ours, layer, number in stacks:
        leaves = [
            ("attention.latent", "self_attn.kv_a_proj_with_mqa.weight", "LD->DL"),
            ("attention.latent_norm.scale", "self_attn.kv_a_layernorm.weight", "R->R"),
            ("attention.key_value", "self_attn.kv_b_proj.weight", "HWR->RHW"),
            ("attention.out", "self_attn.o_proj.weight", "DHU->HUD"),
        ]
        query = "q_proj"
        if cfg.latent.query_rank is not None:
            query = "q_b_proj"
            leaves += [
                ("attention.query_latent", "self_attn.q_a_proj.weight", "QD->DQ"),
                ("attention.query_norm.scale", "self_attn.q_a_layernorm.weight", "Q->Q"),
            ]
        leaves.append(("attention.query", f"self_attn.{query}.weight", "HKQ->QHK"))
        width, shared = ("Z", "mlp") if ours == "dense" else ("Y", "mlp.shared_experts")
        leaves += _gated("mlp", shared, width)
        if ours == "blocks":
            leaves += [
                ("moe.router", "mlp.gate.weight", "ED->DE"),
                ("moe.bias", "mlp.gate.e_score_correction_bias", "E->E"),
                *_gated("moe", "mlp.experts.{e}", "F"),
            ]
        mapped += [
            Rule(f"{ours}.{leaf}", f"{layer}.{theirs}", dims, None, "", number)
            for leaf, theirs, dims in leaves
        ]
    return mapped


def _gated(ours: str, theirs: str, width: str) -> list[tuple[str, str, str]]:
    """The three matrices of a gated feed-forward layer. width: its letter."""
    return [
        (f"{ours}.gate", f"{theirs}.gate_proj.weight", f"{width}D->D{width}"),
        (f"{ours}.up", f"{theirs}.up_proj.weight", f"{width}D->D{width}"),
        (f"{ours}.down", f"{theirs}.down_proj.weight", f"D{width}->{width}D"),
    ]


def _gpt2_rules(cfg: DecoderConfig) -> list[Rule]:
    """GPT-2: Conv1D weights (in, out), fused q k v, biases everywhere."""
    layer = "transformer.h.{i}"
    mapped = [
        Rule("tokens", "transformer.wte.weight", "VD->VD"),
        Rule("positions", "transformer.wpe.weight", "ND->ND"),
    ]
    for part, ours in enumerate(("query", "key", "value")):
        mapped += [
            Rule(f"blocks.attention.{ours}", f"{layer}.attn.c_attn.weight", "D3HK->DHK", part),
            Rule(f"blocks.attention.{ours}_bias", f"{layer}.attn.c_attn.bias", "3HK->HK", part),
        ]
    mapped += [
        Rule("blocks.attention.out", f"{layer}.attn.c_proj.weight", "HKD->HKD"),
        Rule("blocks.attention.out_bias", f"{layer}.attn.c_proj.bias", "D->D"),
        Rule("blocks.mlp.up", f"{layer}.mlp.c_fc.weight", "DF->DF"),
        Rule("blocks.mlp.up_bias", f"{layer}.mlp.c_fc.bias", "F->F"),
        Rule("blocks.mlp.down", f"{layer}.mlp.c_proj.weight", "FD->FD"),
        Rule("blocks.mlp.down_bias", f"{layer}.mlp.c_proj.bias", "D->D"),
    ]
    for ours, theirs in (
        ("blocks.attention_norm", f"{layer}.ln_1"),
        ("blocks.mlp_norm", f"{layer}.ln_2"),
        ("norm", "transformer.ln_f"),
    ):
        mapped += [
            Rule(f"{ours}.scale", f"{theirs}.weight", "D->D"),
            Rule(f"{ours}.shift", f"{theirs}.bias", "D->D"),
        ]
    if not cfg.tied:
        mapped.append(Rule("head", "lm_head.weight", "VD->DV"))
    return mapped


def rules(cfg: DecoderConfig) -> list[Rule]:
    """Returns one rule for each leaf. Raises: UserError when no family has this shape."""
    special = {"gpt2": _gpt2_rules, "gpt_oss": _gpt_oss_rules, "deepseek_v3": _deepseek_rules}
    mapped = special.get(family(cfg), _llama_rules)(cfg)
    return fused(mapped) if family(cfg) == "phi3" else mapped


def spellings(name: str) -> tuple[str, ...]:
    """Returns how files may call a tensor: those of a network without its head (GPT2Model,
    LlamaModel) leave a prefix out."""
    return name, name.removeprefix("transformer."), name.removeprefix("model.")


def is_needless(name: str, cfg: DecoderConfig) -> bool:
    """Tells whether a tensor of a checkpoint is a buffer that transformers does not load either."""
    return name.endswith(BUFFERS.get(family(cfg), FREQUENCIES)) or predicts_more(name, cfg)


def predicts_more(name: str, cfg: DecoderConfig) -> bool:
    """Tells whether a tensor is of DeepSeek-V3's layers behind the last one, which predict further
    tokens (num_nextn_predict_layers) and have no part in the logits."""
    number = re.match(r"(?:model\.)?layers\.(\d{1,9})\.", name)
    return bool(cfg.latent.rank and number and int(number[1]) >= cfg.depth)


def copies(cfg: DecoderConfig) -> dict[str, str]:
    """Returns {tensor that a file may hold again: the tied one that it must equal}."""
    table = {r.ours: r.theirs for r in rules(cfg)}["tokens"]
    return {"lm_head.weight": table} if cfg.tied else {}


def free(cfg: DecoderConfig) -> set[str]:
    """Returns the members that may differ from a folder whose weights are loaded."""
    names = {"dropout", "window", "vocab_multiple", "norm_eps"} | {f"moe.{n}" for n in TRAINED}
    names |= {"mlp"} if cfg.moe.experts else set()
    names |= {"moe.bias_rate"} if cfg.latent.rank else set()  # above 0 in this family
    names |= set() if cfg.moe.dense_layers else {"moe.dense_width"}
    return names | ({"max_positions"} if cfg.position != "learned" else set())


def _unlike_llama(cfg: DecoderConfig) -> bool:
    """Tells whether a model has what no family has that Llama's names and members describe."""
    return (
        cfg.norms != "before"
        or cfg.embed_scaled
        or cfg.query_scale is not None
        or (cfg.qk_norm and cfg.qk_norm_over == "width")
        or cfg.rope.partial != 1.0
        or cfg.rope.local_theta is not None
        or "n" in cfg.letters
    )


def _later_family(cfg: DecoderConfig) -> Family | None:
    """Returns Gemma 3, OLMo 2, SmolLM3 or Phi-3 for a model of its shape."""
    is_plain = (cfg.block, cfg.position, cfg.bias) == ("serial", "rope", "none")
    if not is_plain or cfg.moe.experts or cfg.latent.rank or cfg.sinks:
        return None
    form = cfg.norm, cfg.norms, cfg.activation, cfg.qk_norm and cfg.qk_norm_over
    if form == ("rms_plus_one", "both", "geglu_tanh", "head"):
        has_bases = "w" not in cfg.letters or cfg.rope.local_theta is not None
        is_gemma = cfg.embed_scaled and has_bases and "n" not in cfg.letters
        return "gemma3_text" if is_gemma and cfg.rope.partial == 1.0 and cfg.pattern else None
    if cfg.embed_scaled or cfg.query_scale is not None or cfg.rope.local_theta is not None:
        return None
    is_full = cfg.rope.partial == 1.0 and cfg.window is None
    if form == ("rms", "after", "swiglu", "width"):
        return "olmo2" if is_full and cfg.pattern is None else None
    if form != ("rms", "before", "swiglu", False):
        return None
    if "n" in cfg.letters:
        return "smollm3" if is_full else None
    is_phi = cfg.rope.partial != 1.0 or cfg.rope.scaling == "longrope"
    return "phi3" if is_phi and cfg.pattern is None else None


def family(cfg: DecoderConfig) -> Family:
    """Returns the Hugging Face model type of this shape. Raises: UserError when there is none."""
    like_gpt2 = (cfg.norm, cfg.position, cfg.activation, cfg.bias) == (
        "layer",
        "learned",
        "gelu_tanh",
        "all",
    )
    if (later := _later_family(cfg)) is not None:
        return later
    like_llama = (cfg.norm, cfg.position, cfg.activation) == ("rms", "rope", "swiglu")
    like_llama &= not _unlike_llama(cfg)
    if cfg.latent.rank or cfg.sinks:
        return _newer_family(cfg)
    if cfg.block == "serial" and like_gpt2 and not cfg.qk_norm and cfg.window is None:
        if cfg.kv_heads == cfg.heads and cfg.heads * cfg.head_width == cfg.width:
            return "gpt2"
    if cfg.block == "serial" and like_llama and cfg.moe.experts:
        told = ("experts", "top_k", "width", "normalise", *TRAINED)
        plain = dataclasses.replace(MoeConfig(), **{n: getattr(cfg.moe, n) for n in told})
        if cfg.bias == "none" and cfg.moe == plain:
            if cfg.qk_norm:
                return "qwen3_moe"
            if cfg.moe.normalise:
                return "mixtral"
    elif cfg.block == "serial" and like_llama:
        if cfg.qk_norm and cfg.bias == "none":
            return "qwen3"
        if cfg.bias == "qkv" and not cfg.qk_norm:
            return "qwen2"
        if cfg.bias == "none" and not cfg.qk_norm and len(set(cfg.letters)) < 2:
            return "llama" if cfg.window is None else "mistral"
    raise _no_family(cfg)


def _newer_family(cfg: DecoderConfig) -> Family:
    """`family` of latent attention or sinks."""
    told = ("experts", "top_k", "width", *TRAINED)
    if cfg.latent.rank:
        told += ("shared", "normalise", "scale", "groups", "top_groups", "bias_rate")
        told += ("dense_layers", "dense_width")
        plain, kind = MoeConfig(score="sigmoid"), "deepseek_v3"
        fits = (cfg.activation, cfg.window) == ("swiglu", None) and cfg.moe.shared > 0
        fits = fits and cfg.moe.bias_rate > 0
    else:
        plain, kind = MoeConfig(), "gpt_oss"
        fits = (cfg.activation, cfg.bias, cfg.qk_norm) == ("swiglu_clamped", "all", False)
        fits = fits and "n" not in cfg.letters
    alike = dataclasses.replace(plain, **{n: getattr(cfg.moe, n) for n in told})
    fits = fits and (cfg.block, cfg.norm, cfg.position) == ("serial", "rms", "rope")
    if fits and cfg.moe.experts and cfg.moe == alike:
        return kind
    raise _no_family(cfg)


def _no_family(cfg: DecoderConfig) -> UserError:
    return UserError(
        f"no Hugging Face family has this shape: block {cfg.block}, norm {cfg.norm}, position "
        f"{cfg.position}, activation {cfg.activation}, bias {cfg.bias}, qk_norm {cfg.qk_norm}, "
        f"window {cfg.window}, sinks {cfg.sinks}, latent rank {cfg.latent.rank}, moe "
        f"{cfg.moe if cfg.moe.experts else 'none'}; "
        f"{', '.join(get_args(Family))} can be written"
    )


# ---- config.json of the decoders


_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def from_hf_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Returns our configuration of a config.json. Raises: UserError for what we cannot compute."""
    config = check_members(config, tuple(_ARCHITECTURES))
    kind = config["model_type"]
    if kind == "gpt2":
        return _from_gpt2(config)
    word = "hidden_activation" if kind == "gemma3_text" else "hidden_act"
    known: Activation = "geglu_tanh" if kind == "gemma3_text" else "swiglu"
    spelled(word, config[word], (known,))
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if kind == "deepseek_v3":
        return _from_deepseek(config)
    if kind == "gpt_oss":
        require(config, swiglu_limit=LIMIT, swiglu_alpha=STEEPNESS, attention_bias=True)
        require(config, experts_per_token=config["num_experts_per_tok"])
        known = "swiglu_clamped"
    head_width = config.get("head_dim", width // heads)
    window, pattern = _kinds(config)
    more: dict[str, Any] = {}
    if kind == "gemma3_text":
        scalar = config["query_pre_attn_scalar"]
        more = {"norm": "rms_plus_one", "norms": "both", "embed_scaled": True}
        more |= {"query_scale": None if scalar == head_width else float(scalar)}
    elif kind == "olmo2":
        more = {"norms": "after", "qk_norm_over": "width"}
    return DecoderConfig(
        **more,
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_width=head_width,
        activation=known,
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        bias="qkv" if kind == "qwen2" else "all" if kind == "gpt_oss" else "none",
        sinks=kind == "gpt_oss",
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2"),
        window=window,
        pattern=pattern,
        tied=config["tie_word_embeddings"],
        rope=_gemma_rope(config) if kind == "gemma3_text" else _rope(config),
        moe=_moe(config),
    )


# (DeepSeek-V3, arXiv 2412.19437 section 4.2) how far a step moves an expert's bias.
_BIAS_RATE = 1e-3


def _from_deepseek(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of DeepSeek-V3."""
    require(config, rope_interleave=True, attention_bias=False, scoring_func="sigmoid")
    require(config, topk_method="noaux_tc", moe_layer_freq=1, ep_size=1)
    layers, first = config["num_hidden_layers"], config["first_k_dense_replace"]
    heads, rotary = config["num_attention_heads"], config["qk_rope_head_dim"]
    if first >= layers:
        raise UserError(
            f"config.json: first_k_dense_replace={first} must be below num_hidden_layers={layers}: "
            "a model without experts is not read in this family"
        )
    width = config["qk_nope_head_dim"] + rotary
    require(config, num_key_value_heads=heads, head_dim=rotary, qk_head_dim=width)
    return DecoderConfig(
        layers=layers - first,
        width=config["hidden_size"],
        heads=heads,
        kv_heads=heads,
        head_width=width,
        vocab=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        tied=config["tie_word_embeddings"],
        rope=_rope(config),
        latent=LatentConfig(
            rank=config["kv_lora_rank"],
            query_rank=config.get("q_lora_rank"),
            rotary=rotary,
            value=config["v_head_dim"],
        ),
        moe=MoeConfig(
            experts=config["n_routed_experts"],
            top_k=config["num_experts_per_tok"],
            width=config["moe_intermediate_size"],
            shared=config["n_shared_experts"],
            score="sigmoid",
            normalise=config["norm_topk_prob"],
            scale=float(config["routed_scaling_factor"]),
            groups=config["n_group"],
            top_groups=config["topk_group"],
            bias_rate=_BIAS_RATE,
            dense_layers=first,
            dense_width=config["intermediate_size"],
        ),
    )


def _moe(config: Mapping[str, Any]) -> MoeConfig:
    """Reads the routing of Mixtral, GPT-OSS and Qwen3-MoE; other families have none."""
    if config["model_type"] not in ("mixtral", "qwen3_moe", "gpt_oss"):
        return MoeConfig()
    if config["model_type"] != "qwen3_moe":
        require(config, norm_topk_prob=True)
        experts, width = config["num_local_experts"], config["intermediate_size"]
        return MoeConfig(experts, config["num_experts_per_tok"], width)
    if config.get("mlp_only_layers") not in (None, []):
        raise UserError(
            f"config.json: mlp_only_layers={config['mlp_only_layers']} is not supported, only none"
        )
    width, normalise = config["moe_intermediate_size"], config["norm_topk_prob"]
    experts = config["num_experts"]
    return MoeConfig(experts, config["num_experts_per_tok"], width, normalise=normalise)


FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types


def _kinds(config: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Reads (window, pattern), as each family's attention does in transformers."""
    window, kind = config.get("sliding_window"), config["model_type"]
    layers = config["num_hidden_layers"]
    if kind == "smollm3":
        return None, _without_positions(config, layers)
    if not config.get("use_sliding_window", True):  # a member of the Qwens only
        window = None
    if kind not in ("qwen2", "qwen3", "gemma3_text", "gpt_oss"):
        return window, None
    if kind == "gemma3_text":
        every = config.get("sliding_window_pattern", 6)
        of_layers = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    elif kind == "gpt_oss":
        of_layers = [(SLIDING, FULL)[i % 2] for i in range(layers)]
    else:
        above = min(config["max_window_layers"], layers) if window else layers
        of_layers = [FULL] * above + [SLIDING] * (layers - above)
    each = config.get("layer_types", of_layers)
    if len(each) != layers:
        raise UserError(f"config.json: layer_types has {len(each)} types for {layers} layers")
    if strange := set(each) - {FULL, SLIDING}:
        raise UserError(
            f"config.json: layer_types of {', '.join(sorted(strange)):.60} are not supported, only "
            f"{FULL} and {SLIDING}"
        )
    if SLIDING in each and window is None:
        raise UserError(
            "config.json: layer_types says sliding_attention, and there is no window: "
            "use_sliding_window is false or sliding_window is null"
        )
    letters = "".join("f" if one == FULL else "w" for one in each)
    window = window if "w" in letters else None
    if len(set(letters)) == 1 and kind != "gemma3_text":
        return window, None
    return window, shortest(letters)


def _without_positions(config: Mapping[str, Any], layers: int) -> str | None:
    """Reads SmolLM3's layers without rotary positions, as a pattern."""
    if config.get("use_sliding_window") and config.get("sliding_window") is not None:
        raise UserError(
            "config.json: use_sliding_window=true is not supported for smollm3, only false"
        )
    every = config["no_rope_layer_interval"]
    has = config.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(layers)])
    if len(has) != layers:
        raise UserError(f"config.json: no_rope_layers has {len(has)} numbers for {layers} layers")
    types = config.get("layer_types", [FULL] * layers)
    if len(types) != layers or set(types) != {FULL}:
        raise UserError(
            f"config.json: layer_types must be {FULL} for each of {layers} layers of smollm3"
        )
    letters = "".join("f" if one else "n" for one in has)
    return shortest(letters) if "n" in letters else None


def shortest(letters: str) -> str:
    """Returns the shortest pattern whose repetition these letters begin."""
    count = len(letters)
    return next(
        letters[:n] for n in range(1, count + 1) if (letters[:n] * count)[:count] == letters
    )


_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
# {rope_type: (members that it must have, those that it may have)}
_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (_LLAMA3, ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", _ORIGINAL), ("factor", "attention_factor")),
}


def _gemma_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Reads rotary settings of full and of sliding layers, in the forms of transformers 4 and 5."""
    nested = config.get("rope_parameters") or {}
    if strange := sorted(set(nested) - {FULL, SLIDING}):
        raise UserError(
            f"config.json: rope_parameters has {', '.join(strange[:5]):.60}; it must have "
            f"{FULL} and {SLIDING}, each with its own settings"
        )
    full, local = (nested.get(n) or {} for n in (FULL, SLIDING))
    if not isinstance(full, dict) or not isinstance(local, dict):
        raise UserError("config.json: rope_parameters must hold objects")
    bases = {"rope_theta": config.get("rope_theta", 1e6)}
    rope = _rope({**config, **bases, "rope_parameters": full})
    bases = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    plain = {n: config[n] for n in ("model_type", "max_position_embeddings")}
    near = _rope({**plain, **bases, "rope_parameters": local})
    if near.is_scaled:
        raise UserError(
            f"config.json: rope_type {local.get('rope_type')} of {SLIDING} is not supported, only "
            "default"
        )
    return dataclasses.replace(rope, local_theta=near.theta)


# (transformers, GptOssConfig) where the config.json of gpt_oss says nothing.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Reads rope_parameters of transformers 5, rope_theta and rope_scaling of transformers 4."""
    both = [config[n] for n in ("rope_scaling", "rope_parameters") if config.get(n)]
    if not both and config["model_type"] == "gpt_oss":
        both = [_GPT_OSS_ROPE]
    if len(both) == 2 and both[0] != both[1]:
        raise UserError(
            "config.json: rope_scaling and rope_parameters say two things; keep rope_parameters"
        )
    family_of, longest = config["model_type"], config["max_position_embeddings"]
    theta = config.get("rope_theta", table()["families"][family_of].get("rope_theta"))
    settings: dict[str, Any] = {"rope_theta": theta}
    settings |= both[0] if both else {}
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and family_of != "phi3":
        raise UserError("config.json: partial_rotary_factor is not supported, only 1.0")
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = "longrope" if kind == "su" and family_of == "phi3" else kind
    settings = check_kinds(settings)
    if kind not in _SCALINGS or (family_of == "phi3" and kind not in ("default", "longrope")):
        raise UserError(
            f"config.json: rope_type {kind} is not supported for {family_of}, only "
            f"{'default, longrope' if family_of == 'phi3' else ', '.join(_SCALINGS)}"
        )
    needed, optional = _SCALINGS[kind]
    if _ORIGINAL in needed:
        settings.setdefault(_ORIGINAL, longest)
        settings |= {_ORIGINAL: config[_ORIGINAL]} if _ORIGINAL in config else {}
    if lacking := [n for n in needed if n not in settings]:
        raise UserError(f"config.json: rope_type {kind} lacks {', '.join(lacking)}")
    used = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *needed, *optional}
    used |= {"factor"} if settings.get("factor") == 1.0 else set()
    if strange := sorted(n for n in settings if n not in used and settings[n] is not None):
        raise UserError(
            f"config.json: {', '.join(strange[:5])} of the rotary settings is not read for "
            f"rope_type {kind}, so it may stand for arithmetic that is not done here"
        )
    plain = RopeConfig(theta=float(settings["rope_theta"]), partial=float(partial))
    factor = settings.get("factor", longest / settings.get(_ORIGINAL, longest))
    says_factor = settings.get("attention_factor") is not None
    if kind == "default" or (factor == 1.0 and kind != "longrope" and not says_factor):
        return plain
    original = longest if kind == "dynamic" else settings.get(_ORIGINAL, plain.original_positions)
    named: dict[str, Any] = {n: settings[n] for n in (*needed, *optional) if n in settings}
    named |= {"factor": float(factor), "scaling": kind, "original_positions": original}
    named.pop(_ORIGINAL, None)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            named[f"{name}s"] = ",".join(map(repr, map(float, named.pop(name))))
    floats = ("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow")
    for name in (*floats, "mscale", "mscale_all_dim"):
        if name in named:
            named[name] = float(named[name])
    return dataclasses.replace(plain, **named)


def _rope_to_hf(cfg: DecoderConfig, kind: Family) -> dict[str, Any]:
    """Returns the members about rotary positions, in the form that transformers 4 and 5 read."""
    rope = cfg.rope
    members: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if kind == "gemma3_text":
        members["rope_local_base_freq"] = rope.local_theta or rope.theta
    if kind == "phi3":
        members["partial_rotary_factor"] = rope.partial
    if not rope.is_scaled:
        return members
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "dynamic" and rope.original_positions != cfg.max_positions:
        raise UserError(
            f"model.rope.original_positions={rope.original_positions}: transformers takes "
            f"model.max_positions={cfg.max_positions} for it with the scaling dynamic; make them "
            "equal (--model.rope.original_positions)"
        )
    if rope.scaling in ("llama3", "yarn", "longrope"):
        scaling[_ORIGINAL] = rope.original_positions
    if rope.scaling == "llama3":
        scaling |= {n: getattr(rope, n) for n in ("low_freq_factor", "high_freq_factor")}
    if rope.scaling in ("yarn", "longrope"):
        optional = {n: getattr(rope, n) for n in _SCALINGS[rope.scaling][1]}
        scaling |= {n: value for n, value in optional.items() if value is not None}
    if rope.scaling == "longrope":
        short = factors_of("short_factors", rope.short_factors)
        long = factors_of("long_factors", rope.long_factors) or short
        scaling |= {"short_factor": short, "long_factor": long}
        members[_ORIGINAL] = rope.original_positions
    return members | {"rope_scaling": scaling}


def _from_gpt2(config: Mapping[str, Any]) -> DecoderConfig:
    spelled("activation_function", config["activation_function"], ("gelu_tanh",))
    width, heads = config["n_embd"], config["n_head"]
    if width % heads:
        raise UserError(f"config.json: n_head={heads} must divide n_embd={width}")
    return DecoderConfig(
        layers=config["n_layer"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp=config.get("n_inner", 4 * width),
        vocab=config["vocab_size"],
        norm="layer",
        norm_eps=config["layer_norm_epsilon"],
        position="learned",
        max_positions=config["n_positions"],
        activation="gelu_tanh",
        bias="all",
        tied=config["tie_word_embeddings"],
    )


def to_hf_config(cfg: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Returns the config.json that `from_hf_config` and transformers read."""
    kind = family(cfg)
    common = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": cfg.vocab,
        "tie_word_embeddings": cfg.tied,
        "torch_dtype": dtype,
    }
    if kind == "gpt2":
        return common | {
            "n_layer": cfg.layers,
            "n_embd": cfg.width,
            "n_head": cfg.heads,
            "n_inner": cfg.mlp,
            "n_positions": cfg.max_positions,
            "layer_norm_epsilon": cfg.norm_eps,
            "activation_function": ACTIVATIONS[cfg.activation].hugging_face[0],
        }
    rope = _rope_to_hf(cfg, kind)
    window: dict[str, Any] = {"sliding_window": cfg.window}
    if kind == "gpt_oss":
        if rope["rope_scaling"] is None:  # null would be the family's own scaling
            rope["rope_scaling"] = {"rope_type": "default", "rope_theta": cfg.rope.theta}
        words = {"w": SLIDING, "f": FULL}
        letters = cfg.letters or ("f" if cfg.window is None else "w") * cfg.layers
        window["layer_types"] = [words[letter] for letter in letters]
    if kind.startswith("qwen"):
        window |= {"use_sliding_window": cfg.window is not None, "max_window_layers": 0}
        types = {"w": SLIDING, "f": FULL}
        if cfg.layer_kinds:
            window["layer_types"] = [types[letter] for letter in cfg.letters]
    return (
        common
        | rope
        | (window if kind not in ("llama", "olmo2", "smollm3", "deepseek_v3") else {})
        | {
            "num_hidden_layers": cfg.layers,
            "hidden_size": cfg.width,
            "num_attention_heads": cfg.heads,
            "num_key_value_heads": cfg.kv_heads,
            "head_dim": cfg.head_width,
            "intermediate_size": cfg.mlp,
            "rms_norm_eps": cfg.norm_eps,
            "max_position_embeddings": cfg.max_positions,
            **(
                {"hidden_act": ACTIVATIONS[cfg.activation].hugging_face[0]}
                if kind != "gemma3_text"
                else {}
            ),
            "attention_bias": kind == "gpt_oss",
        }
        | _moe_to_hf(kind, cfg)
        | _later_to_hf(kind, cfg)
    )


def _later_to_hf(kind: Family, cfg: DecoderConfig) -> dict[str, Any]:
    """Returns the members that only Gemma 3, SmolLM3 or Phi-3 has."""
    members: dict[str, Any] = {}
    default = table()["families"][kind]["members"].get("pad_token_id", {}).get("default")
    if kind in ("smollm3", "phi3") and default >= cfg.vocab:  # transformers refuses such an id
        members["pad_token_id"] = None
    if kind == "smollm3":
        members["no_rope_layers"] = [int(letter != "n") for letter in cfg.letters]
    if kind != "gemma3_text":
        return members
    scalar = cfg.query_scale or cfg.head_width
    return {
        "hidden_activation": ACTIVATIONS[cfg.activation].hugging_face[0],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "layer_types": [SLIDING if letter == "w" else FULL for letter in cfg.letters],
    }


def _moe_to_hf(kind: Family, cfg: DecoderConfig) -> dict[str, Any]:
    moe = cfg.moe
    if kind in ("mixtral", "gpt_oss"):
        members = {"num_local_experts": moe.experts, "intermediate_size": moe.width}
        if kind == "gpt_oss":
            members |= {"swiglu_limit": LIMIT, "swiglu_alpha": STEEPNESS}
    elif kind == "deepseek_v3":
        latent = cfg.latent
        members = {
            "num_hidden_layers": cfg.depth,
            "intermediate_size": moe.dense_width,
            "first_k_dense_replace": moe.dense_layers,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.rank,
            "qk_rope_head_dim": latent.rotary,
            "qk_nope_head_dim": cfg.head_width - latent.rotary,
            "v_head_dim": latent.value,
            "head_dim": latent.rotary,
            "n_routed_experts": moe.experts,
            "n_shared_experts": moe.shared,
            "moe_intermediate_size": moe.width,
            "norm_topk_prob": moe.normalise,
            "routed_scaling_factor": moe.scale,
            "n_group": moe.groups,
            "topk_group": moe.top_groups,
            "rope_interleave": True,
            "num_nextn_predict_layers": 0,
        }
    elif kind == "qwen3_moe":
        members = {
            "num_experts": moe.experts,
            "moe_intermediate_size": moe.width,
            "norm_topk_prob": moe.normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    else:
        return {}
    return members | {"num_experts_per_tok": moe.top_k}
