"""Megatron checkpoints as Hugging Face ones: tensors renamed, qkv and gates split, padding cut.

The training's saved arguments become a config.json, so everything that reads a Hugging Face folder
(hf.py, transformers) reads the result. Families: llama, qwen2 (biases of q, k, v), qwen3 (norms of
queries and keys), gpt2. Not there, each an error: experts, multi-latent attention, fp8 weights,
windows, partial or interleaved rotation, norms of weight - 1. The optimizer's state is never taken:
it is cut over data-parallel ranks in ways of its own.

Legend: D width, G key-value heads, R queries of one of them, K head width.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.formats.megatron_files import find_step, open_step
from megajax.checkpoint.formats.torch_files import show
from megajax.core.errors import UserError
from megajax.layers.mlp import ACTIVATIONS, Activation
from megajax.models import names
from megajax.models.decoder_config import DecoderConfig

_TABLE, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
Change = Callable[[np.ndarray, DecoderConfig], np.ndarray]
MAX_ITERATION = 10**12  # (chosen) steps that a training may have

# Arguments that become config.json.
READ = {
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups",
    "group_query_attention", "kv_channels", "normalization", "position_embedding_type", "swiglu",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "norm_epsilon", "layernorm_epsilon",
    "untie_embeddings_and_output_weights", "vocab_size", "padded_vocab_size", "seq_length",
    "max_position_embeddings", "rotary_base", "use_rope_scaling", "rope_scaling_factor",
    "bias_gelu_fusion", "openai_gelu",
}  # fmt: skip
# Arguments that change what is computed, and the values with which nothing changes. What only one
# of these switches on (moe_*, yarn_*, q_lora_rank) is inert without it.
PLAIN: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0), "num_moe_experts": (None, 0), "multi_latent_attention": (False,),
    "apply_layernorm_1p": (False,), "layernorm_zero_centered_gamma": (False,),
    "rotary_interleaved": (False,), "rotary_percent": (1.0,), "window_size": (None,),
    "squared_relu": (False,), "quick_geglu": (False,), "rotary_seq_len_interpolation_factor":
    (None,), "mtp_num_layers": (None, 0), "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,), "softmax_type": ("vanilla",), "softmax_scale": (None,),
    "no_rope_freq": (None,), "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,), "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,), "qk_l2_norm": (False,), "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,), "use_mup": (False,), "enable_mhc_connections": (False,),
    "is_hybrid_model": (False,), "hybrid_layer_pattern": (None,), "hybrid_override_pattern":
    (None,), "hybrid_attention_ratio": (0.0,), "hybrid_mlp_ratio": (0.0,), "spec": (None,),
    "retro_add_retriever": (False,), "retro_attention_gate": (1,), "mamba_ssm_ratio": (None, 0.0),
    "rope_type": (None, "rope"), "quant_recipe": (None,), "mrope_section": (None,),
}  # fmt: skip
_NAMES = Path(__file__).with_name("megatron_arguments.json")


class MegatronFolder:
    """A checkpoint of a decoder.

    config: its config.json. tensors: {Hugging Face's name: (shape, dtype)}.
    iteration: steps that it was trained. left_out: what is there and was not taken.
    """

    def __init__(
        self,
        path: str | Path,
        step: int | None = None,
        vocab: int | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        """Opens it. step: None: the latest. vocab: words without padding; None: as the arguments
        say, else with it. config: a config.json, for a checkpoint that has no arguments.

        Raises: UserError for one that is damaged, not whole or of a model that we cannot compute.
        """
        self._source = open_step(find_step(path, step))
        self.folder, self.left_out = self._source.folder, self._source.left_out
        self.iteration = self._source.iteration if type(self._source.iteration) is int else 0
        if not 0 <= self.iteration <= MAX_ITERATION:
            raise UserError(f"{self.folder} is of iteration {show(self.iteration)}")
        try:
            if config is None:
                config = to_hf_config(self._source.args, vocab)
            self._cfg = names.from_hf_config(config)
        except UserError:
            raise
        except (LookupError, TypeError, ArithmeticError, ValueError, AttributeError) as error:
            raise UserError(f"the configuration lacks or distorts {error} (--hf_config)") from None
        self.config = dict(config)
        self._homes = self._find()
        rules, sizes = names.rules(self._cfg), names.sizes(self._cfg)
        shapes = {
            r.name(i): r.their_shape(sizes) for r in rules for i in np.ndindex(r.stack(sizes))
        }
        self.tensors = {
            name: (shapes[name], self._source.dtype(home))
            for name, (home, _) in self._homes.items()
        }

    def view(self, name: str) -> np.ndarray:
        """Returns a tensor under Hugging Face's name. Raises: UserError for damage, other shapes.

        At most two tensors are in memory while it is made.
        """
        home, change = self._homes[name]
        try:
            stored = self._source.read(home, self._cfg.activation == "swiglu")
            if home == _TABLE and self._cfg.tied and _HEAD in self._source.names:
                self._check_head(stored)
            found = change(stored, self._cfg)
        except UserError:
            raise
        except (ValueError, IndexError, TypeError) as error:  # NumPy's words on the shapes
            raise UserError(
                f"{self.folder}: the shapes of {home} are not those of the configuration: {error}"
            ) from None
        if found.shape != self.tensors[name][0]:
            raise UserError(
                f"{self.folder}: {home} gives {name} the shape {found.shape}, the configuration "
                f"says {self.tensors[name][0]}"
            )
        return found

    def _check_head(self, table: np.ndarray) -> None:
        """Refuses a head that differs from the table, which the arguments say it is."""
        if not np.array_equal(table, self._source.read(_HEAD), equal_nan=True):
            raise UserError(
                f"{self.folder}: {_HEAD} differs from {_TABLE}, and the configuration ties the two "
                "(untie_embeddings_and_output_weights=False); if it is a head of its own, give a "
                'config.json with "tie_word_embeddings": false (--hf_config)'
            )

    def _find(self) -> dict[str, tuple[str, Change]]:
        """Returns {Hugging Face's name: (Megatron's, what to do)}; refuses strangers."""
        cfg, source = self._cfg, self._source
        table = _GPT2 if names.family(cfg) == "gpt2" else _LLAMA
        sizes, found = names.sizes(cfg), {}
        for rule in names.rules(cfg):
            home, change = table[rule.theirs]
            for index in np.ndindex(rule.stack(sizes)):
                stored = home.format(**dict(zip("i", index, strict=False)))
                if stored not in source.names:
                    raise UserError(f"{self.folder} has no {stored}, of {rule.name(index)}")
                found[rule.name(index)] = stored, change
        used = {home for home, _ in found.values()}
        used |= {_HEAD} if cfg.tied else set()  # a copy of the table, which `view` compares
        if strangers := sorted(set(source.names) - used):
            raise UserError(
                f"{self.folder} has tensors that a {names.family(cfg)} does not: "
                f"{', '.join(strangers[:5])}"
            )
        return found


def to_hf_config(args: Mapping[str, Any], vocab: int | None = None) -> dict[str, Any]:
    """Returns the config.json of a training's arguments (megatron/training/arguments.py).

    Raises: UserError for an argument that is missing, or that we cannot compute with.
    """
    if not args:
        raise UserError("the checkpoint has no arguments; give its config.json (--hf_config)")
    for name, value in args.items():
        _check_argument(name, value)
    try:
        kind = _family(args)
        words = vocab or args.get("vocab_size") or args["padded_vocab_size"]
        positions = args.get("max_position_embeddings") or args["seq_length"]
        eps = args["norm_epsilon"] if "norm_epsilon" in args else args["layernorm_epsilon"]
        tied = not args["untie_embeddings_and_output_weights"]
        common = {"model_type": kind, "vocab_size": words, "tie_word_embeddings": tied}
        heads, width = args["num_attention_heads"], args["hidden_size"]
        if kind == "gpt2":
            return common | {
                "n_layer": args["num_layers"], "n_embd": width, "n_head": heads,
                "n_inner": args["ffn_hidden_size"], "n_positions": positions,
                "layer_norm_epsilon": eps, "activation_function": _word("gelu_tanh"),
            }  # fmt: skip
        grouped = args.get("group_query_attention", False)
        return common | {
            "num_hidden_layers": args["num_layers"], "hidden_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": args["num_query_groups"] if grouped else heads,
            "head_dim": args.get("kv_channels") or width // heads,
            "intermediate_size": args["ffn_hidden_size"], "rms_norm_eps": eps,
            "max_position_embeddings": positions, "hidden_act": _word("swiglu"),
            "rope_theta": float(args.get("rotary_base", 10000)), "rope_scaling": _scaling(args),
        }  # fmt: skip
    except KeyError as error:
        raise UserError(
            f"the checkpoint's arguments lack {error}; give its config.json (--hf_config)"
        ) from None


def _word(activation: Activation) -> str:
    return ACTIVATIONS[activation].hugging_face[0]


@functools.cache
def _known() -> frozenset[str]:
    """Returns the names of Megatron's arguments (tests/golden/make_megatron_arguments.py)."""
    return frozenset(json.loads(_NAMES.read_text()))


def _check_argument(name: str, value: Any) -> None:
    """Refuses an argument that is not read, not known to be inert, and not switched off."""
    shown = value if isinstance(value, bool | int | float) else show(value)
    if name in PLAIN:
        if not any(value == v and type(value) is type(v) for v in PLAIN[name]) and value:
            raise UserError(f"{name}={shown} is not supported, only {PLAIN[name][0]}")
    elif name not in READ and name not in _known() and value not in (None, False, 0, "", [], {}):
        raise UserError(
            f"{name}={shown} is no argument of Megatron-LM that is known here, so it may change "
            "what the model computes; if it does not, give the model's config.json (--hf_config)"
        )


def _family(args: Mapping[str, Any]) -> str:
    """Returns the model type of a shape. Raises: UserError when there is none."""
    norm, place = args.get("normalization", "LayerNorm"), args["position_embedding_type"]
    swiglu, biased = args.get("swiglu", False), args.get("add_bias_linear", True)
    qkv_bias, qk_norm = args.get("add_qkv_bias", False), args.get("qk_layernorm", False)
    if place != "rope" and args.get("use_rotary_position_embeddings"):
        raise UserError(
            f"use_rotary_position_embeddings=True and position_embedding_type={show(place)} say "
            "two things; give the model's config.json (--hf_config)"
        )
    if (norm, place, swiglu, biased) == ("RMSNorm", "rope", True, False):
        if not (qkv_bias and qk_norm):
            return "qwen2" if qkv_bias else "qwen3" if qk_norm else "llama"
    elif (norm, place, swiglu, biased) == ("LayerNorm", "learned_absolute", False, True):
        tanh = args.get("bias_gelu_fusion", True) or args.get("openai_gelu", False)
        if not args.get("add_position_embedding", True):
            raise UserError("add_position_embedding=False is not supported, only True")
        if tanh and not qk_norm and not args.get("group_query_attention", False):
            return "gpt2"
    raise UserError(
        f"no family of ours has normalization={show(norm)}, position_embedding_type={show(place)}, "
        f"swiglu={show(swiglu)}, add_bias_linear={show(biased)}, add_qkv_bias={show(qkv_bias)}, "
        f"qk_layernorm={show(qk_norm)}; llama, qwen2, qwen3 and gpt2 (GELU by tanh) can be imported"
    )


def _scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    if not args.get("use_rope_scaling", False):
        return None
    return {
        "rope_type": "llama3", "factor": float(args.get("rope_scaling_factor", 8.0)),
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


# ---- one tensor of theirs -> one of Hugging Face's


def _same(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    return x


def _turned(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    return x.T  # GPT-2's Conv1D holds (in, out)


def _words(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    return x[: cfg.vocab]  # what pads it is noise there, not zeros


def _heads(part: int) -> Change:
    """Makes the function that takes queries, keys or values out of (G (R + 2) K, ...)."""

    def take(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
        ratio = cfg.heads // cfg.kv_heads
        shape = (cfg.kv_heads, ratio + 2, cfg.head_width)
        if x.shape[0] != np.prod(shape):
            raise UserError(f"a linear_qkv of {x.shape} does not hold {shape} (groups, heads, K)")
        split = x.reshape(*shape, *x.shape[1:])
        which = (slice(0, ratio), slice(ratio, ratio + 1), slice(ratio + 1, None))[part]
        return split[:, which].reshape(-1, *x.shape[1:])

    return take


def _half(part: int) -> Change:
    """Makes the function that takes the gate or the up of (2 F, D)."""
    return lambda x, cfg: x[part * (x.shape[0] // 2) :][: x.shape[0] // 2]


def _qkv(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    """All queries, all keys, all values, as GPT-2 has them."""
    joined = np.concatenate([_heads(part)(x, cfg) for part in range(3)])
    return joined.T


def _llama() -> dict[str, tuple[str, Change]]:
    ours, theirs = "decoder.layers.{i}", "model.layers.{i}"
    found: dict[str, tuple[str, Change]] = {
        "model.embed_tokens.weight": (_TABLE, _words),
        "lm_head.weight": (_HEAD, _words),
        "model.norm.weight": ("decoder.final_layernorm.weight", _same),
    }
    attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
    for part, letter in enumerate("qkv"):
        for kind in ("weight", "bias"):
            name = f"{theirs}.self_attn.{letter}_proj.{kind}"
            found[name] = (f"{attention}.linear_qkv.{kind}", _heads(part))
        norm = f"{theirs}.self_attn.{letter}_norm.weight"
        found[norm] = (f"{attention}.{letter}_layernorm.weight", _same)
    return found | {
        f"{theirs}.self_attn.o_proj.weight": (f"{attention}.linear_proj.weight", _same),
        f"{theirs}.mlp.gate_proj.weight": (f"{mlp}.linear_fc1.weight", _half(0)),
        f"{theirs}.mlp.up_proj.weight": (f"{mlp}.linear_fc1.weight", _half(1)),
        f"{theirs}.mlp.down_proj.weight": (f"{mlp}.linear_fc2.weight", _same),
        f"{theirs}.input_layernorm.weight": (f"{ours}.input_layernorm.weight", _same),
        f"{theirs}.post_attention_layernorm.weight": (f"{ours}.pre_mlp_layernorm.weight", _same),
    }


def _gpt2() -> dict[str, tuple[str, Change]]:
    ours, theirs = "decoder.layers.{i}", "transformer.h.{i}"
    found: dict[str, tuple[str, Change]] = {
        "transformer.wte.weight": (_TABLE, _words),
        "transformer.wpe.weight": ("embedding.position_embeddings.weight", _same),
        "lm_head.weight": (_HEAD, _words),
    }
    for name, home, change in (
        ("attn.c_attn", "self_attention.linear_qkv", _qkv),
        ("attn.c_proj", "self_attention.linear_proj", _turned),
        ("mlp.c_fc", "mlp.linear_fc1", _turned),
        ("mlp.c_proj", "mlp.linear_fc2", _turned),
        ("ln_1", "input_layernorm", _same),
        ("ln_2", "pre_mlp_layernorm", _same),
    ):
        for kind in ("weight", "bias"):
            found[f"{theirs}.{name}.{kind}"] = (f"{ours}.{home}.{kind}", change)
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = (f"decoder.final_layernorm.{kind}", _same)
    return found


_LLAMA, _GPT2 = _llama(), _gpt2()
