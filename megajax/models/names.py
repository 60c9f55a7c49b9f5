"""Hugging Face name maps: our leaves <-> their tensors, and our configuration <-> config.json.

Of the decoders; encoder_names.py has the encoders'. Families: gpt2, llama, mistral (llama with a
window), qwen2, qwen3, mixtral, qwen3_moe.

Legend: D width, F feed-forward (of one expert, where there are any), E experts, H query heads, G
key-value heads, K head width, V vocabulary, N positions, 3 the fused q, k, v of GPT-2.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from megajax.core.errors import UserError
from megajax.layers.mlp import ACTIVATIONS
from megajax.layers.moe import MoeConfig
from megajax.layers.rope import RopeConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.models.hf_members import check_kinds, check_members, table
from megajax.models.name_rules import Rule, require, spelled

Family = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]

# Buffers that older checkpoints carry: masks of GPT-2, the others' rotary frequencies.
BUFFERS = {"gpt2": (".attn.bias", ".attn.masked_bias")}
FREQUENCIES = (".rotary_emb.inv_freq",)

# Members of MoeConfig that a checkpoint knows nothing of.
TRAINED = ("mode", "capacity_factor", "share_slots", "aux_loss", "z_loss")


def sizes(cfg: DecoderConfig) -> dict[str, int]:
    """Returns {letter of a rule's dims: size}; '{i}': the layers, '{e}': the experts."""
    F = cfg.moe.width if cfg.moe.experts else cfg.mlp
    return {
        "{i}": cfg.layers, "{e}": cfg.moe.experts, "D": cfg.width, "F": F, "E": cfg.moe.experts,
        "H": cfg.heads, "G": cfg.kv_heads, "K": cfg.head_width, "V": cfg.vocab,
        "N": cfg.max_positions, "3": 3,
    }  # fmt: skip


def _attention(prefix: str, bias: str, qk_norm: bool) -> list[Rule]:
    found = []
    for ours, theirs, heads in (
        ("query", "q_proj", "H"),
        ("key", "k_proj", "G"),
        ("value", "v_proj", "G"),
    ):
        found.append(
            Rule(
                f"blocks.attention.{ours}",
                f"{prefix}.self_attn.{theirs}.weight",
                f"{heads}KD->D{heads}K",
            )
        )
        if bias == "qkv":
            found.append(
                Rule(
                    f"blocks.attention.{ours}_bias",
                    f"{prefix}.self_attn.{theirs}.bias",
                    f"{heads}K->{heads}K",
                )
            )
    found.append(Rule("blocks.attention.out", f"{prefix}.self_attn.o_proj.weight", "DHK->HKD"))
    if qk_norm:
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            name = f"{prefix}.self_attn.{theirs}.weight"
            found.append(Rule(f"blocks.attention.{ours}.scale", name, "K->K"))
    return found


def _llama_rules(cfg: DecoderConfig) -> list[Rule]:
    """Llama and its relatives: separate torch Linears, RMSNorm."""
    layer = "model.layers.{i}"
    found = [Rule("tokens", "model.embed_tokens.weight", "VD->VD")]
    found += _attention(layer, cfg.bias, cfg.qk_norm)
    ours, theirs, gate, up, down = "mlp", "mlp", "gate_proj", "up_proj", "down_proj"
    if cfg.moe.experts:
        ours, home = "moe", f"{layer}.mlp"
        if family(cfg) == "mixtral":
            home, gate, up, down = f"{layer}.block_sparse_moe", "w1", "w3", "w2"
        theirs = home.removeprefix(f"{layer}.") + ".experts.{e}"
        found.append(Rule("blocks.moe.router", f"{home}.gate.weight", "ED->DE"))
    found += [
        Rule(f"blocks.{ours}.gate", f"{layer}.{theirs}.{gate}.weight", "FD->DF"),
        Rule(f"blocks.{ours}.up", f"{layer}.{theirs}.{up}.weight", "FD->DF"),
        Rule(f"blocks.{ours}.down", f"{layer}.{theirs}.{down}.weight", "DF->FD"),
        Rule("blocks.attention_norm.scale", f"{layer}.input_layernorm.weight", "D->D"),
        Rule("blocks.mlp_norm.scale", f"{layer}.post_attention_layernorm.weight", "D->D"),
        Rule("norm.scale", "model.norm.weight", "D->D"),
    ]
    if not cfg.tied:
        found.append(Rule("head", "lm_head.weight", "VD->DV"))
    return found


def _gpt2_rules(cfg: DecoderConfig) -> list[Rule]:
    """GPT-2: Conv1D weights (in, out), fused q k v, biases everywhere."""
    layer = "transformer.h.{i}"
    found = [
        Rule("tokens", "transformer.wte.weight", "VD->VD"),
        Rule("positions", "transformer.wpe.weight", "ND->ND"),
    ]
    for part, ours in enumerate(("query", "key", "value")):
        found += [
            Rule(f"blocks.attention.{ours}", f"{layer}.attn.c_attn.weight", "D3HK->DHK", part),
            Rule(f"blocks.attention.{ours}_bias", f"{layer}.attn.c_attn.bias", "3HK->HK", part),
        ]
    found += [
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
        found += [
            Rule(f"{ours}.scale", f"{theirs}.weight", "D->D"),
            Rule(f"{ours}.shift", f"{theirs}.bias", "D->D"),
        ]
    if not cfg.tied:
        found.append(Rule("head", "lm_head.weight", "VD->DV"))
    return found


def rules(cfg: DecoderConfig) -> list[Rule]:
    """Returns one rule for each leaf. Raises: UserError when no family has this shape."""
    return _gpt2_rules(cfg) if family(cfg) == "gpt2" else _llama_rules(cfg)


def spellings(name: str) -> tuple[str, ...]:
    """Returns how files may call a tensor: those of a network without its head (GPT2Model,
    LlamaModel) leave a prefix out."""
    return name, name.removeprefix("transformer."), name.removeprefix("model.")


def is_needless(name: str, cfg: DecoderConfig) -> bool:
    """Tells whether a tensor of a checkpoint is a buffer that transformers does not load either."""
    return name.endswith(BUFFERS.get(family(cfg), FREQUENCIES))


def copies(cfg: DecoderConfig) -> dict[str, str]:
    """Returns {tensor that a file may hold again: the tied one that it must equal}."""
    table = {r.ours: r.theirs for r in rules(cfg)}["tokens"]
    return {"lm_head.weight": table} if cfg.tied else {}


def free(cfg: DecoderConfig) -> set[str]:
    """Returns the members that may differ from a folder whose weights are loaded."""
    found = {"dropout", "window", "vocab_multiple", "norm_eps"} | {f"moe.{n}" for n in TRAINED}
    found |= {"mlp"} if cfg.moe.experts else set()
    return found | ({"max_positions"} if cfg.position != "learned" else set())


def family(cfg: DecoderConfig) -> Family:
    """Returns the Hugging Face model type of this shape. Raises: UserError when there is none."""
    like_gpt2 = (cfg.norm, cfg.position, cfg.activation, cfg.bias) == (
        "layer", "learned", "gelu_tanh", "all",
    )  # fmt: skip
    like_llama = (cfg.norm, cfg.position, cfg.activation) == ("rms", "rope", "swiglu")
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
    raise UserError(
        f"no Hugging Face family has this shape: block {cfg.block}, norm {cfg.norm}, position "
        f"{cfg.position}, activation {cfg.activation}, bias {cfg.bias}, qk_norm {cfg.qk_norm}, "
        f"window {cfg.window}, moe {cfg.moe if cfg.moe.experts else 'none'}; "
        f"{', '.join(get_args(Family))} can be written"
    )


# ---- config.json

_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def from_hf_config(found: Mapping[str, Any]) -> DecoderConfig:
    """Returns our configuration of a config.json. Raises: UserError for what we cannot compute."""
    found = check_members(found, tuple(_ARCHITECTURES))
    kind = found["model_type"]
    if kind == "gpt2":
        return _from_gpt2(found)
    spelled("hidden_act", found["hidden_act"], ("swiglu",))
    heads, width = found["num_attention_heads"], found["hidden_size"]
    return DecoderConfig(
        layers=found["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=found.get("num_key_value_heads", heads),
        head_width=found.get("head_dim", width // heads),
        mlp=found["intermediate_size"],
        vocab=found["vocab_size"],
        norm_eps=found["rms_norm_eps"],
        max_positions=found["max_position_embeddings"],
        bias="qkv" if kind == "qwen2" else "none",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        window=_window(found),
        tied=found["tie_word_embeddings"],
        rope=_rope(found),
        moe=_moe(found),
    )


def _moe(found: Mapping[str, Any]) -> MoeConfig:
    """Reads the routing of Mixtral and Qwen3-MoE; other families have none."""
    if found["model_type"] not in ("mixtral", "qwen3_moe"):
        return MoeConfig()
    if found["model_type"] == "mixtral":
        require(found, norm_topk_prob=True)
        experts, width = found["num_local_experts"], found["intermediate_size"]
        return MoeConfig(experts, found["num_experts_per_tok"], width)
    if found.get("mlp_only_layers") not in (None, []):
        raise UserError(
            f"config.json: mlp_only_layers={found['mlp_only_layers']} is not supported, only none"
        )
    width, normalise = found["moe_intermediate_size"], found["norm_topk_prob"]
    experts = found["num_experts"]
    return MoeConfig(experts, found["num_experts_per_tok"], width, normalise=normalise)


def _window(found: Mapping[str, Any]) -> int | None:
    """Reads the sliding window, as each family's attention does in transformers."""
    window, kind = found.get("sliding_window"), found["model_type"]
    if not found.get("use_sliding_window", True):  # a member of the Qwens only
        window = None
    if kind not in ("qwen2", "qwen3"):
        return window
    layers = found["num_hidden_layers"]
    above = min(found["max_window_layers"], layers) if window else layers
    of_layers = ["full_attention"] * above + ["sliding_attention"] * (layers - above)
    each = found.get("layer_types", of_layers)
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


def _rope(found: Mapping[str, Any]) -> RopeConfig:
    """Reads rope_parameters of transformers 5, rope_theta and rope_scaling of transformers 4."""
    both = [found[n] for n in ("rope_scaling", "rope_parameters") if found.get(n)]
    if len(both) == 2 and both[0] != both[1]:
        raise UserError(
            "config.json: rope_scaling and rope_parameters say two things; keep rope_parameters"
        )
    theta = found.get("rope_theta", table()["families"][found["model_type"]]["rope_theta"])
    settings: dict[str, Any] = {"rope_theta": theta}
    settings |= both[0] if both else {}
    for place in (found, settings):
        if place.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise UserError("config.json: partial_rotary_factor is not supported, only 1.0")
    kind = settings.get("rope_type", settings.get("type", "default"))
    settings = check_kinds(settings)
    used = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind == "llama3":
        used |= {*_LLAMA3}
        old = "original_max_position_embeddings"
        settings.setdefault(old, found["max_position_embeddings"])
        settings |= {old: found[old]} if old in found else {}
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


def _from_gpt2(found: Mapping[str, Any]) -> DecoderConfig:
    spelled("activation_function", found["activation_function"], ("gelu_tanh",))
    width, heads = found["n_embd"], found["n_head"]
    if width % heads:
        raise UserError(f"config.json: n_head={heads} must divide n_embd={width}")
    return DecoderConfig(
        layers=found["n_layer"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp=found.get("n_inner", 4 * width),
        vocab=found["vocab_size"],
        norm="layer",
        norm_eps=found["layer_norm_epsilon"],
        position="learned",
        max_positions=found["n_positions"],
        activation="gelu_tanh",
        bias="all",
        tied=found["tie_word_embeddings"],
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
    window = {"sliding_window": cfg.window}
    if kind.startswith("qwen"):
        window |= {"use_sliding_window": cfg.window is not None, "max_window_layers": 0}
    return (
        common
        | rope
        | (window if kind != "llama" else {})
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
            "attention_bias": False,
        }
        | _moe_to_hf(kind, cfg)
    )


def _moe_to_hf(kind: Family, cfg: DecoderConfig) -> dict[str, Any]:
    moe = cfg.moe
    if kind == "mixtral":
        own = {"num_local_experts": moe.experts, "intermediate_size": moe.width}
    elif kind == "qwen3_moe":
        own = {
            "num_experts": moe.experts,
            "moe_intermediate_size": moe.width,
            "norm_topk_prob": moe.normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    else:
        return {}
    return own | {"num_experts_per_tok": moe.top_k}
