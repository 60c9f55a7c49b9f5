"""Members of a Hugging Face config.json: read, inert, or refused by name.

hf_members.json has what transformers' own configuration classes have: each family's members, their
defaults and which may be null (tests/golden/make_hf_members.py writes it). A member that is absent
gets the default of its family; a null one must be one that may be null. What a name map (names.py,
encoder_names.py, vlm_names.py) reads is in READ, what changes no product of a forward pass is in
INERT. Every other member must have its default, and a member that the class does not have is
refused, unless NEUTRAL lists its value: forks compute by such members, and transformers itself
reads some of them.
"""

import functools
import json
import reprlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.layers.mlp import ACTIVATIONS, Activation

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
    "no_rope_layer_interval", "sliding_window_pattern",
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
_NUMBERS = ("short_factor", "long_factor")
_WHOLES = ("no_rope_layers",)
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
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
)
_SHARES = ("hidden_dropout_prob", "dropout")
_FLAGS = (
    "tie_word_embeddings",
    "norm_topk_prob",
    "use_sliding_window",
    "rope_interleave",
    "truncate",
)
_TEXTS = (
    "model_type",
    "hidden_act",
    "hidden_activation",
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
    *_NUMBERS, *_WHOLES,
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
    "gemma3_text": {"sliding_window_pattern", "rope_local_base_freq"},
    "olmo2": {"head_dim"},
    "smollm3": {"head_dim"},
    "phi3": {"head_dim"},
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
# Which its published files have; transformers writes Gemma's and reads layer_types.
_IGNORED = {"qwen3_moe": {"max_window_layers"}, "gemma3_text": {"_sliding_window_pattern"}}
_ROPE = {"rope_scaling", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}


def _is_number(x: Any) -> bool:
    # A comparison, which is False for NaN and takes whole numbers that no float holds.
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return is_number and abs(x) <= sys.float_info.max


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_list(x: Any, is_member: Callable[[Any], bool]) -> bool:
    return isinstance(x, list) and len(x) <= MOST_STACKED and all(map(is_member, x))


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
    "a list of numbers above 0": (
        _NUMBERS,
        lambda x: _is_list(x, lambda y: _is_number(y) and y > 0),
    ),
    "a list of whole numbers": (_WHOLES, lambda x: _is_list(x, _is_whole)),
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
