"""Hugging Face name maps: our leaves <-> their tensors, and our configuration <-> config.json.

Of the decoders; encoder_names.py has the encoders'. Families: gpt2, llama, mistral (llama with a
window), qwen2, qwen3, mixtral, qwen3_moe, gpt_oss, deepseek_v3.

Legend: D width, F feed-forward (of one expert, where there are any), E experts, H query heads, G
key-value heads, K head width, V vocabulary, N positions, 3 the fused q, k, v of GPT-2, 2 the fused
gate and up of GPT-OSS. Of DeepSeek-V3: Q, R ranks of the latents, L latent with the rotary key, U
width of a head's values, W of its key without the rotary part and its values, Z, Y feed-forward
widths of the first layers and of the shared experts.
"""

import dataclasses
import functools
import json
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from megajax.core.errors import UserError
from megajax.layers.attention import RopeConfig
from megajax.layers.latent import LatentConfig
from megajax.layers.mlp import ACTIVATIONS, LIMIT, STEEPNESS, Activation
from megajax.layers.moe import MoeConfig
from megajax.models.decoder_config import DecoderConfig

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
    the number that the leaf's first layer '{i}' has there."""

    ours: str
    theirs: str
    dims: str
    part: int | None = None
    their_dims: str = ""
    first: int = 0

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
        merged = self.dims.split("->")[0]
        for fused in ("3HK", "HK", "GK", "3hk", "hk", "HW", "HU", "F2"):
            if fused in merged:
                size = int(np.prod([sizes[c] for c in fused]))
                others = [sizes[c] for c in merged.replace(fused, "*") if c != "*"]
                return (size, *others) if merged.startswith(fused) else (*others, size)
        return tuple(sizes[c] for c in merged)

    def to_ours(self, tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Returns their tensor as a view in our shape (of one layer, of one expert)."""
        theirs, ours = self.dims.split("->")
        view = tensor.reshape([sizes[c] for c in theirs])
        if self.part is not None:
            view = view[(slice(None),) * theirs.index(self.fused) + (self.part,)]
            theirs = theirs.replace(self.fused, "")
        return view.transpose([theirs.index(c) for c in ours])

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Returns one piece of our leaf with their order of dimensions (that of the parts left
        out)."""
        theirs, ours = self.dims.split("->")
        return array.transpose([ours.index(c) for c in theirs.replace(self.fused, "")])


def spelled(member: str, word: str, known: tuple[Activation, ...]) -> Activation:
    """Returns the activation that transformers calls `word`. Raises: UserError for another one."""
    names = {w: a for a in known for w in ACTIVATIONS[a].hugging_face}
    if word not in names:
        raise UserError(f"config.json: {member}={word} is not supported, only {', '.join(names)}")
    return names[word]


def require(config: Mapping[str, Any], **required: Any) -> None:
    """Refuses settings that change the arithmetic."""
    for name, value in required.items():
        if config.get(name, value) != value:
            raise UserError(f"config.json: {name}={config[name]} is not supported, only {value}")


# ---- members of a config.json
#
# Members of a config.json are read, inert, or refused by name.
#
# hf_members.json has what transformers' own configuration classes have: each family's members,
# their defaults and which may be null (tests/golden/make_hf_members.py writes it). A member that is
# absent gets the default of its family; a null one must be one that may be null. What a name map
# reads is in READ, what changes no product of a forward pass is in INERT. Every other member must
# have its default, and a member that the class does not have is refused, unless NEUTRAL lists its
# value: forks compute by such members, and transformers itself reads some of them.


_TABLE = Path(__file__).with_name("hf_members.json")
_COUNTS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window",
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "original_max_position_embeddings", "n_layer", "n_embd", "n_head", "n_inner", "n_positions",
    "num_hidden_groups", "num_labels", "dim", "hidden_dim", "n_layers", "n_heads",
    "embedding_size", "depth", "embed_dim", "num_heads", "mlp_ratio", "in_channels", "patch_size",
    "spatial_merge_size", "temporal_patch_size", "n_routed_experts", "q_lora_rank", "kv_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_group", "topk_group",
)  # fmt: skip
_STACKED = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_hidden_groups",
    "depth",
)
MOST = 2**31 - 1  # (chosen) of a size; the product of two is one that NumPy can count to
MOST_STACKED = 2**14  # (chosen: ten times the deepest networks) layers, or experts
_WHOLE = (
    "max_window_layers",
    "type_vocab_size",
    "image_token_id",
    "n_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
_POSITIVE = (
    "rms_norm_eps",
    "layer_norm_epsilon",
    "layer_norm_eps",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
)
_SHARES = ("hidden_dropout_prob", "dropout")
_FLAGS = ("tie_word_embeddings", "norm_topk_prob", "use_sliding_window", "rope_interleave")
_TEXTS = (
    "model_type",
    "hidden_act",
    "activation",
    "activation_function",
    "rope_type",
    "type",
    "problem_type",
)
_LISTS = ("layer_types", "architectures")
_OBJECTS = (
    "rope_scaling",
    "rope_parameters",
    "id2label",
    "label2id",
    "text_config",
    "vision_config",
)

READ = {
    *_COUNTS, *_WHOLE, *_POSITIVE, *_SHARES, *_FLAGS, *_TEXTS, *_LISTS, *_OBJECTS, "label2id",
    "mlp_only_layers", "pad_token_id", "partial_rotary_factor", "quantization_config",
}  # fmt: skip
# Members without a part in what a forward pass computes: training, generation, loading, history.
INERT = {
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "output_hidden_states", "output_attentions", "return_dict", "use_return_dict", "torchscript",
    "chunk_size_feed_forward", "initializer_range", "initializer_factor", "bos_token_id",
    "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id",
    "decoder_start_token_id", "finetuning_task", "task_specific_params", "tokenizer_class",
    "prefix", "gradient_checkpointing", "language", "license", "output_past", "use_bfloat16",
    "tf_legacy_loss", "attn_implementation", "_attn_implementation", "_commit_hash",
    "_attn_implementation_autoset", "attention_implementation", "experts_implementation",
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "classifier_dropout", "classifier_dropout_prob", "qa_dropout", "seq_classif_dropout",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "predict_special_tokens", "reorder_and_upcast_attn", "pretraining_tp",
    "router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "sinusoidal_pos_embds",
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
    "pooler_size_per_head", "pooler_type", "net_structure_type", "gap_size", "num_memory_blocks",
    "down_scale_factor", "tie_weights_", "n_ctx", "unsloth_version", "unsloth_fixed",
    "transformers.js_config", "sentence_transformers", "model_max_length", "max_sequence_length",
    "is_llama_config", "neftune_noise_alpha", "_num_labels", "vision_token_id", "video_token_id",
    "seq_aux", "aux_loss_alpha",
    "vision_start_token_id", "vision_end_token_id",
}  # fmt: skip
# Members that a family's class does not have, and the values that say what it computes anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "mlp_bias": (False,), "bias": (False,), "qkv_bias": (False,),
    "use_qk_norm": (False,), "rope_interleaved": (False,), "is_causal": (True,),
    "is_decoder": (False,), "add_cross_attention": (False,), "pruned_heads": ({},),
    "position_embedding_type": ("absolute",), "use_bidirectional_attention": (False,),
    "n_shared_experts": (0,), "num_nextn_predict_layers": (0,), "use_mrope": (False,),
    "in_chans": (3,), "spatial_patch_size": (14,),
}  # fmt: skip
# Members that transformers reads although the class does not list them, by family.
_UNLISTED = {
    "qwen2": {"head_dim"},
    "qwen3_moe": {"head_dim"},
    "mixtral": {"norm_topk_prob"},
    "gpt_oss": {"experts_per_token", "initial_context_length"},
    "deepseek_v3": {
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
        "ep_size",
        "head_dim",
        "qk_head_dim",
    },
}
# Code of published folders that transformers has, and does not run unless it is told to.
KNOWN_CODE = {
    "deepseek_v3": {
        "configuration_deepseek.DeepseekV3Config",
        "modeling_deepseek.DeepseekV3Model",
        "modeling_deepseek.DeepseekV3ForCausalLM",
    }
}
_IGNORED = {"qwen3_moe": {"max_window_layers"}}  # which its published files have
_ROPE = {"rope_scaling", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}


def _is_number(x: Any) -> bool:
    # A comparison, which is False for NaN and takes whole numbers that no float holds.
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return is_number and abs(x) <= sys.float_info.max


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_texts(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(word, str) for word in x)


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    f"a whole number in [1, {MOST}]": (_COUNTS, lambda x: _is_whole(x) and 1 <= x <= MOST),
    f"a whole number in [1, {MOST_STACKED}]": (_STACKED, lambda x: x <= MOST_STACKED),
    f"a whole number in [0, {MOST}]": (_WHOLE, lambda x: _is_whole(x) and 0 <= x <= MOST),
    "a finite number above 0": (_POSITIVE, lambda x: _is_number(x) and x > 0),
    "a number in [0, 1)": (_SHARES, lambda x: _is_number(x) and 0 <= x < 1),
    "true or false": (_FLAGS, lambda x: isinstance(x, bool)),
    "a string": (_TEXTS, lambda x: isinstance(x, str)),
    "a list of strings": (_LISTS, _is_texts),
    "an object": (_OBJECTS, lambda x: isinstance(x, dict)),
}


def check_kinds(config: Any, only: Any = None) -> dict[str, Any]:
    """Returns the members of a config.json without those that are null.

    only: the names of the members whose kinds are checked; None: all.

    Raises: UserError for what is no object, and for a member of another kind than it must be.
    """
    if not isinstance(config, Mapping):
        raise UserError(f"config.json must hold a JSON object, not {reprlib.repr(config):.40}")
    checked = dict(config)
    for kind, (names, is_legal) in _KINDS.items():
        for name in names:
            value = checked.get(name)
            if value is None:
                checked.pop(name, None)
            elif (only is None or name in only) and not is_legal(value):
                raise UserError(
                    f"config.json: {name} is {reprlib.repr(value):.60}, it must be {kind}"
                )
    return checked


@functools.cache
def table() -> dict[str, Any]:
    """Returns what hf_members.json holds."""
    return json.loads(_TABLE.read_text())


def check_members(config: Any, families: tuple[str, ...]) -> dict[str, Any]:
    """Returns the members of a config.json with what transformers 5 takes for absent ones.

    A member that may be null and is, or whose default is null, is left out. families: that the
    caller knows.
    Raises: UserError for another family, for a member of another kind than it must be, and for one
    that may change what the model computes and that is not read here.
    """
    check_kinds(config, ("model_type",))
    config = dict(config)
    kind = config.get("model_type")
    if kind not in families:
        raise UserError(f"model_type {kind!r} is not one of {', '.join(families)}")
    members = table()["common"] | table()["families"][kind]["members"]
    config = _in_one_word(config, table()["families"][kind]["other_words"], members)
    code = config.get("auto_map")
    is_known = isinstance(code, dict) and {*map(str, code.values())} <= KNOWN_CODE.get(kind, set())
    if code and not is_known:
        raise UserError(
            "config.json: auto_map names code of the folder's own, which may compute another model "
            "and is not run here; a folder whose model is a plain one needs no auto_map"
        )
    for name, value in config.items():
        if name != "auto_map":
            _check_use(name, value, kind, members)
    merged = {n: m["default"] for n, m in members.items() if m["default"] is not None} | config
    return check_kinds(merged) | {"model_type": kind}


def _in_one_word(
    config: Mapping[str, Any], words: Mapping[str, str], members: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns members under the names that the class has; transformers takes either of two."""
    renamed = dict(config)
    for other, name in words.items():
        other, name = (name, other) if name not in members else (other, name)
        if other not in renamed:
            continue
        value = renamed.pop(other)
        if renamed.get(name, value) != value or value is None:
            raise UserError(
                f"config.json: {other}={reprlib.repr(value):.40} and {name}="
                f"{reprlib.repr(renamed.get(name)):.40} are two words for one member; keep {name}"
            )
        renamed[name] = value
    return renamed


def _check_use(name: str, value: Any, kind: str, members: Mapping[str, Any]) -> None:
    """Refuses a member that is not read and may change what is computed."""
    if name in INERT or name in table()["generation"] or name in _IGNORED.get(kind, ()):
        return
    shown = f"config.json: {name}={reprlib.repr(value):.60}"
    if name not in members and value is None:
        return
    if name in members:
        if value is None and not members[name]["null"]:
            raise UserError(f"{shown.replace('=None', ' is null')}, which transformers refuses too")
        if value is None or name in READ or value == members[name]["default"]:
            return
        raise UserError(f"{shown} is not supported, only {members[name]['default']}")
    has_rope = "rope_parameters" in members
    if name in _UNLISTED.get(kind, ()) or name in ("num_labels", "quantization_config"):
        return
    if name == "model_type" or (has_rope and name in _ROPE):
        return
    if name in NEUTRAL:
        if not any(value == v and type(value) is type(v) for v in NEUTRAL[name]):
            raise UserError(f"{shown} is not supported, only {NEUTRAL[name][0]}")
        return
    raise UserError(
        f"{shown} is no member of transformers' configuration of {kind}, so it may stand for "
        "arithmetic that is not done here; if it changes nothing, remove it from config.json"
    )


# ---- tensors of the decoders


Family = Literal[
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"
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


def _attention(prefix: str, bias: str, qk_norm: bool) -> list[Rule]:
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
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            name = f"{prefix}.self_attn.{theirs}.weight"
            mapped.append(Rule(f"blocks.attention.{ours}.scale", name, "K->K"))
    return mapped


def _llama_rules(cfg: DecoderConfig) -> list[Rule]:
    """Llama and its relatives: separate torch Linears, RMSNorm."""
    layer = "model.layers.{i}"
    mapped = [Rule("tokens", "model.embed_tokens.weight", "VD->VD")]
    mapped += _attention(layer, cfg.bias, cfg.qk_norm)
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
        Rule("blocks.attention_norm.scale", f"{layer}.input_layernorm.weight", "D->D"),
        Rule("blocks.mlp_norm.scale", f"{layer}.post_attention_layernorm.weight", "D->D"),
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
    mapped = _norms_and_ends(cfg, "blocks", layer) + _attention(layer, "all", False)
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
    return special.get(family(cfg), _llama_rules)(cfg)


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


def family(cfg: DecoderConfig) -> Family:
    """Returns the Hugging Face model type of this shape. Raises: UserError when there is none."""
    like_gpt2 = (cfg.norm, cfg.position, cfg.activation, cfg.bias) == (
        "layer",
        "learned",
        "gelu_tanh",
        "all",
    )
    like_llama = (cfg.norm, cfg.position, cfg.activation) == ("rms", "rope", "swiglu")
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
        if cfg.bias == "none" and not cfg.qk_norm:
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
}


def from_hf_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Returns our configuration of a config.json. Raises: UserError for what we cannot compute."""
    config = check_members(config, tuple(_ARCHITECTURES))
    kind = config["model_type"]
    if kind == "gpt2":
        return _from_gpt2(config)
    spelled("hidden_act", config["hidden_act"], ("swiglu",))
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if kind == "deepseek_v3":
        return _from_deepseek(config)
    pattern, window = _alternating(config) if kind == "gpt_oss" else (None, _window(config))
    if kind == "gpt_oss":
        require(config, swiglu_limit=LIMIT, swiglu_alpha=STEEPNESS, attention_bias=True)
        require(config, experts_per_token=config["num_experts_per_tok"])
    return DecoderConfig(
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_width=config.get("head_dim", width // heads),
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        activation="swiglu_clamped" if kind == "gpt_oss" else "swiglu",
        bias="qkv" if kind == "qwen2" else "all" if kind == "gpt_oss" else "none",
        sinks=kind == "gpt_oss",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        pattern=pattern,
        window=window,
        tied=config["tie_word_embeddings"],
        rope=_rope(config),
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


def _alternating(config: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Reads (DecoderConfig.pattern, the window) of GPT-OSS, whose layers have a window in turn."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds = {"sliding_attention": "w", "full_attention": "f"}
    turns = [[*kinds][i % 2] for i in range(layers)]
    each = config.get("layer_types", turns)
    if len(each) != layers or not kinds.keys() >= set(each):
        raise UserError(
            f"config.json: layer_types must be {layers} of {', '.join(kinds)}, not "
            f"{reprlib.repr(each)}"
        )
    letters = "".join(kinds[kind] for kind in each)
    if "w" in letters and window is None:
        raise UserError("config.json: layer_types says sliding_attention, and there is no window")
    if len(set(letters)) == 1:
        return None, window if letters[0] == "w" else None
    period = next(n for n in range(1, layers + 1) if letters == (letters[:n] * layers)[:layers])
    return letters[:period], window


def _window(config: Mapping[str, Any]) -> int | None:
    """Reads the sliding window, as each family's attention does in transformers."""
    window, kind = config.get("sliding_window"), config["model_type"]
    if not config.get("use_sliding_window", True):  # a member of the Qwens only
        window = None
    if kind not in ("qwen2", "qwen3"):
        return window
    layers = config["num_hidden_layers"]
    above = min(config["max_window_layers"], layers) if window else layers
    of_layers = ["full_attention"] * above + ["sliding_attention"] * (layers - above)
    each = config.get("layer_types", of_layers)
    if len(each) != layers:
        raise UserError(f"config.json: layer_types has {len(each)} types for {layers} layers")
    if set(each) == {"full_attention"}:
        return None
    if set(each) != {"sliding_attention"}:
        raise UserError(
            f"config.json: layer_types of {sorted(set(each))} are not supported; all layers must "
            "be full_attention or all sliding_attention: a window on some layers only is not read"
        )
    if window is None:
        raise UserError(
            "config.json: layer_types says sliding_attention, and there is no window: "
            "use_sliding_window is false or sliding_window is null"
        )
    return window


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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
    theta = config.get("rope_theta", table()["families"][config["model_type"]]["rope_theta"])
    settings: dict[str, Any] = {"rope_theta": theta}
    settings |= both[0] if both else {}
    for place in (config, settings):
        if place.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise UserError("config.json: partial_rotary_factor is not supported, only 1.0")
    kind = settings.get("rope_type", settings.get("type", "default"))
    settings = check_kinds(settings)
    used = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind == "llama3":
        used |= {*_LLAMA3}
        old = "original_max_position_embeddings"
        settings.setdefault(old, config["max_position_embeddings"])
        settings |= {old: config[old]} if old in config else {}
    elif kind != "default" and not (kind == "linear" and settings.get("factor") == 1.0):
        raise UserError(f"config.json: rope_type {kind} is not supported, only default and llama3")
    used |= {"factor"} if settings.get("factor") == 1.0 else set()
    if lacking := [n for n in _LLAMA3 if kind == "llama3" and n not in settings]:
        raise UserError(f"config.json: rope_type llama3 lacks {', '.join(lacking)}")
    if strange := sorted(n for n in settings if n not in used and settings[n] is not None):
        raise UserError(
            f"config.json: {', '.join(strange[:5])} of the rotary settings is not read for "
            f"rope_type {kind}, so it may stand for arithmetic that is not done here"
        )
    if kind != "llama3" or settings["factor"] == 1.0:
        return RopeConfig(theta=float(settings["rope_theta"]))
    return RopeConfig(
        theta=float(settings["rope_theta"]),
        factor=float(settings["factor"]),
        low_freq_factor=float(settings["low_freq_factor"]),
        high_freq_factor=float(settings["high_freq_factor"]),
        original_positions=int(settings["original_max_position_embeddings"]),
    )


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
    rope: dict[str, Any] = {"rope_theta": cfg.rope.theta, "rope_scaling": None}
    if cfg.rope.factor != 1.0:
        rope["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": cfg.rope.factor,
            "low_freq_factor": cfg.rope.low_freq_factor,
            "high_freq_factor": cfg.rope.high_freq_factor,
            "original_max_position_embeddings": cfg.rope.original_positions,
        }
    window: dict[str, Any] = {"sliding_window": cfg.window}
    if kind == "gpt_oss":
        if rope["rope_scaling"] is None:  # null would be the family's own scaling
            rope["rope_scaling"] = {"rope_type": "default", "rope_theta": cfg.rope.theta}
        words = {"w": "sliding_attention", "f": "full_attention"}
        letters = cfg.letters or ("f" if cfg.window is None else "w") * cfg.layers
        window["layer_types"] = [words[letter] for letter in letters]
    if kind.startswith("qwen"):
        window |= {"use_sliding_window": cfg.window is not None, "max_window_layers": 0}
    return (
        common
        | rope
        | (window if kind not in ("llama", "deepseek_v3") else {})
        | {
            "num_hidden_layers": cfg.layers,
            "hidden_size": cfg.width,
            "num_attention_heads": cfg.heads,
            "num_key_value_heads": cfg.kv_heads,
            "head_dim": cfg.head_width,
            "intermediate_size": cfg.mlp,
            "rms_norm_eps": cfg.norm_eps,
            "max_position_embeddings": cfg.max_positions,
            "hidden_act": ACTIVATIONS[cfg.activation].hugging_face[0],
            "attention_bias": kind == "gpt_oss",
        }
        | _moe_to_hf(kind, cfg)
    )


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
