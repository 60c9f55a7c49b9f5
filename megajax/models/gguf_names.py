"""Names of GGUF files: their metadata -> our configuration, their tensors <-> Hugging Face's.

A leaf of ours is found by the Hugging Face name that names.py has for it, so this map says only how
GGUF calls those tensors. Architectures: llama (Llama, Mistral, Mixtral and what has their shape),
qwen2, qwen3, qwen3moe, gemma3, olmo2, smollm3, phi3. A setting that is unknown here may change the
arithmetic, so it is refused. Source of keys and names: gguf-py/gguf/constants.py of llama.cpp; of
what no key says (which layers have a window or no positions, Gemma 3's local base): its loader of
that architecture.
"""

import math
import reprlib
import sys
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.layers.attention import RopeConfig, frequencies
from megajax.layers.moe import MoeConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.models.hf_members import MOST, MOST_STACKED
from megajax.models.names import Rule, fused, shortest

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "olmo2", "smollm3", "phi3")
FACTORS = "rope_freqs.weight"  # what the rotary frequencies are divided by: Llama 3's scaling
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # longrope's
TABLES = (FACTORS, SHORT, LONG)
GEMMA_PERIOD = 6  # (llama.cpp, its loader of gemma3) each such layer has no window
GEMMA_LOCAL = 10000.0  # (the same) base of the frequencies in layers with a window
SMOLLM_PERIOD = 4  # (llama.cpp, its loader of smollm3) each such layer has no rotary positions

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "down_proj": "ffn_down", "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down",
}  # fmt: skip
# Settings that say nothing about the arithmetic, or may only have a value that changes nothing.
_SILENT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_NEUTRAL: dict[str, tuple] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "rope.scale_linear": (1.0,),
    "attention.clamp_kqv": (0.0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),
    "expert_gating_func": (1,),
    "expert_shared_count": (0,),
}


def find(name: str, there: Container[str]) -> tuple[str, int | None]:
    """Returns (the file's tensor, which expert's part of it or None) of a Hugging Face name.

    there: the names of the file's tensors. Experts are one tensor there or, in older files, each
    its own.
    """
    words = name.split(".")
    home, end = "", words.pop()
    if words[:2] == ["model", "layers"]:
        home, words = f"blk.{words[2]}.", words[3:]
    if "experts" in words:
        expert, member = int(words[-2]), _NAMES[words[-1]]
        alone = f"{home}{member}.{expert}.{end}"
        return (alone, None) if alone in there else (f"{home}{member}_exps.{end}", expert)
    after = f"{home}post_attention_norm.{end}"  # of models with norms after attention
    if words == ["post_attention_layernorm"] and after in there:
        return after, None
    return f"{home}{_NAMES['.'.join(words)]}.{end}", None


def as_stored(rules: list[Rule], there: Container[str]) -> list[Rule]:
    """Returns the rules with joined matrices where a file has them (phi3). there: its tensors."""
    return fused(rules) if "blk.0.attn_qkv.weight" in there else rules


def offset(architecture: str, leaf: str) -> float:
    """Returns what a file adds to a leaf: Gemma's norms are stored less 1 here, in full there."""
    return 1.0 if architecture == "gemma3" and leaf.endswith(".scale") else 0.0


def is_permuted(architecture: str, leaf: str) -> bool:
    """Tells whether a leaf's heads are stored for llama.cpp's first rotary embedding, which turns
    neighbours, (0, 1), (2, 3): ours pairs dimension i with i + K/2."""
    words = ("attention.query", "attention.key", "attention.query_bias", "attention.key_bias")
    return architecture in ("llama", "smollm3") and leaf.endswith(words)


class _Settings:
    """The settings of an architecture, each checked when it is read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self._metadata, self._prefix = metadata, f"{architecture}."
        self._read: set[str] = set()

    def refuse(self, key: str, rule: str) -> UserError:
        value = reprlib.repr(self._metadata.get(self._prefix + key))
        return UserError(f"{self._prefix}{key} is {value:.60}, {rule}")

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._metadata.get(self._prefix + key, default)

    def count(self, key: str, default: int | None = None, most: int = MOST) -> int:
        value = self.get(key, default)
        if value is None:
            raise UserError(f"it has no {self._prefix}{key}")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.refuse(key, f"it must be a whole number in [1, {most}]")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Returns a number as the shortest decimal that float32 rounds to the stored one: 1e-5."""
        value = self.get(key, default)
        if value is None:
            raise UserError(f"it has no {self._prefix}{key}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= float(np.finfo(np.float32).max):
            raise self.refuse(key, "it must be a finite number above 0")
        return float(str(np.float32(value)))

    def check_rest(self) -> None:
        """Refuses settings that nobody read."""
        for full in self._metadata:
            key = full.removeprefix(self._prefix)
            if key == full or key in self._read or key in _SILENT:
                continue
            if key not in _NEUTRAL:
                raise self.refuse(key, "a setting that this model cannot have here")
            if self.get(key) not in _NEUTRAL[key]:
                raise self.refuse(key, f"only {' or '.join(map(str, _NEUTRAL[key]))} is supported")


def architecture(metadata: Mapping[str, Any]) -> str:
    """Returns the file's architecture. Raises: UserError for one that is not read here."""
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"general.architecture is {reprlib.repr(kind):.60}; it must be one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return kind


def from_metadata(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    tables: Mapping[str, np.ndarray],
) -> DecoderConfig:
    """Returns our configuration of a file.

    Args: metadata: of the file. shapes: of the file's tensors. tables: float32 (K/2,), those of
      TABLES that the file has.
    Raises: UserError for what is missing, of a wrong kind, or cannot be computed here.
    """
    kind = architecture(metadata)
    read = _Settings(metadata, kind)
    width, heads = read.count("embedding_length"), read.count("attention.head_count")
    head_width = read.count("attention.key_length", max(1, width // heads))
    rotary = read.count("rope.dimension_count", head_width)
    is_part = kind == "phi3" and rotary < head_width and rotary % 2 == 0
    if read.count("attention.value_length", head_width) != head_width:
        raise read.refuse("attention.value_length", f"it must be {head_width}, the width of a head")
    if rotary != head_width and not is_part:
        raise read.refuse("rope.dimension_count", f"it must be {head_width}, the width of a head")
    table = shapes.get("token_embd.weight", ())
    if len(table) != 2:
        raise UserError("it has no table token_embd.weight of two dimensions")
    mlp = read.count("feed_forward_length")
    layers, longest = read.count("block_count", most=MOST_STACKED), read.count("context_length")
    window, pattern = _kinds(read, kind, layers)
    more: dict[str, Any] = {}
    if kind == "gemma3":
        more = {"norm": "rms_plus_one", "norms": "both", "activation": "geglu_tanh"}
        more |= {"embed_scaled": True}
        if layers == 62 and width / heads != head_width:  # (llama.cpp: of the 27B alone)
            more["query_scale"] = width / heads
    elif kind == "olmo2":
        more = {"norms": "after", "qk_norm_over": "width"}
    cfg = DecoderConfig(
        **more,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=read.count("attention.head_count_kv", heads),
        head_width=head_width,
        mlp=mlp,
        vocab=table[0],
        norm_eps=read.positive("attention.layer_norm_rms_epsilon"),
        max_positions=longest,
        bias="qkv" if "blk.0.attn_q.bias" in shapes else "none",
        qk_norm=kind.startswith(("qwen3", "gemma3", "olmo2")),
        window=window,
        pattern=pattern,
        tied="output.weight" not in shapes,
        rope=_rope(read, kind, (head_width, rotary), longest, tables),
        moe=_moe(read, kind, mlp),
    )
    read.check_rest()
    return cfg


def _kinds(read: _Settings, kind: str, layers: int) -> tuple[int | None, str | None]:
    """Returns (window, pattern) of an architecture's layers."""
    key = "attention.sliding_window"
    window = read.count(key) if read.get(key) else None
    if kind in ("olmo2", "smollm3") and window:
        raise read.refuse(key, "layers with a window are not supported in this architecture")
    if kind == "smollm3":
        letters = "".join(
            "n" if i % SMOLLM_PERIOD == SMOLLM_PERIOD - 1 else "f" for i in range(layers)
        )
        return None, shortest(letters) if "n" in letters else None
    if kind != "gemma3":
        return window, None
    period = read.count(f"{key}_pattern", GEMMA_PERIOD, most=MOST_STACKED)
    if not window:
        return None, "f"
    return window, shortest(
        "".join("f" if i % period == period - 1 else "w" for i in range(layers))
    )


def _moe(read: _Settings, kind: str, mlp: int) -> MoeConfig:
    if not read.get("expert_count"):
        if kind == "qwen3moe":
            raise read.refuse("expert_count", "an architecture with experts must have some")
        return MoeConfig()
    if kind not in ("llama", "qwen3moe"):
        raise read.refuse("expert_count", "this architecture has no experts")
    experts = read.count("expert_count", most=MOST_STACKED)
    width = read.count("expert_feed_forward_length", mlp)
    return MoeConfig(experts, read.count("expert_used_count", most=experts), width)


def _rope(
    read: _Settings,
    architecture_: str,
    widths: tuple[int, int],
    longest: int,
    tables: Mapping[str, np.ndarray],
) -> RopeConfig:
    """widths: of a head, and of what is rotated of it."""
    head_width, factors = widths[0], tables.get(FACTORS)
    if architecture_ == "phi3":
        return _longrope(read, widths, longest, tables)
    if strange := [name for name in (SHORT, LONG) if name in tables]:
        raise UserError(f"{strange[0]} belongs to phi3, not to {architecture_}")
    kind = read.get("rope.scaling.type", "none")
    if architecture_ == "gemma3":
        if kind not in ("none", "linear") or factors is not None:
            raise read.refuse("rope.scaling.type", "only none and linear are, without rope_freqs")
        factor = read.positive("rope.scaling.factor", 1.0) if kind == "linear" else 1.0
        read.get("rope.scaling.factor")
        return RopeConfig(
            theta=read.positive("rope.freq_base", 1000000.0),
            local_theta=read.positive("rope.freq_base_swa", GEMMA_LOCAL),
            factor=factor,
            scaling="linear" if factor != 1.0 else "llama3",
        )
    if kind != "none" and not (kind == "linear" and read.get("rope.scaling.factor", 1.0) == 1.0):
        raise read.refuse("rope.scaling.type", "only none, and Llama 3's by rope_freqs.weight, are")
    read.get("rope.scaling.factor")
    plain = RopeConfig(theta=read.positive("rope.freq_base", 10000.0))
    stated = read.count("rope.scaling.original_context_length", plain.original_positions)
    if factors is None:
        return plain
    if factors.shape != (head_width // 2,):
        raise UserError(f"{FACTORS} has the shape {factors.shape}, not {(head_width // 2,)}")
    with np.errstate(all="ignore"):
        stored = frequencies(plain, head_width) / factors
    greatest = float(factors.max(initial=1.0))
    for original in {stated, plain.original_positions}:
        if 1.0 < greatest < sys.float_info.max:
            scaled = RopeConfig(
                theta=plain.theta,
                factor=float(str(np.float32(greatest))),
                original_positions=original,
            )
            if np.allclose(frequencies(scaled, head_width), stored, rtol=1e-5, atol=0.0):
                return scaled
    if np.all(factors == 1.0):
        return plain
    raise UserError(f"{FACTORS} holds no scaling of Llama 3's kind, so it cannot be computed here")


def _longrope(
    read: _Settings, widths: tuple[int, int], longest: int, tables: Mapping[str, np.ndarray]
) -> RopeConfig:
    """Phi-3's positions: plain, or with factors for short and for long rows."""
    partial = widths[1] / widths[0]
    plain = RopeConfig(theta=read.positive("rope.freq_base", 10000.0), partial=partial)
    original = read.count("rope.scaling.original_context_length", longest)
    stated = read.positive("rope.scaling.attn_factor", 1.0)
    if (kind := read.get("rope.scaling.type", "none")) not in ("none", "longrope"):
        raise read.refuse("rope.scaling.type", f"only none and longrope are, not {kind!r:.20}")
    there = [name for name in TABLES if name in tables]
    if not there:
        if stated != 1.0:
            raise read.refuse("rope.scaling.attn_factor", f"without {SHORT} it must be 1")
        return plain
    if set(there) != {SHORT, LONG}:
        raise UserError(f"it has {', '.join(there)}; longrope needs {SHORT} and {LONG} alone")
    for name in there:
        x = tables[name]
        if x.shape != (widths[1] // 2,) or not np.all(np.isfinite(x) & (x > 0)):
            raise UserError(
                f"{name} of the shape {x.shape} must hold {widths[1] // 2} finite numbers above 0"
            )
    factor = longest / original
    if factor < 1.0 or original < 2:
        raise read.refuse("rope.scaling.original_context_length", f"it must be in [2, {longest}]")
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    short, long_ = (",".join(str(float(str(v))) for v in tables[n]) for n in (SHORT, LONG))
    return RopeConfig(
        theta=plain.theta,
        partial=partial,
        factor=factor,
        scaling="longrope",
        original_positions=original,
        attention_factor=None if math.isclose(stated, usual, rel_tol=1e-5) else stated,
        short_factors=short,
        long_factors=long_,
    )
