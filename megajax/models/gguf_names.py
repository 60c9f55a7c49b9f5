"""Names of GGUF files: their metadata -> our configuration, their tensors <-> Hugging Face's.

A leaf of ours is found by the Hugging Face name that names.py has for it, so this map says only how
GGUF calls those tensors. Architectures: llama (Llama, Mistral, Mixtral and what has their shape),
qwen2, qwen3, qwen3moe. A setting that is unknown here may change the arithmetic, so it is refused.
Source of keys and names: gguf-py/gguf/constants.py of llama.cpp.
"""

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

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
FACTORS = "rope_freqs.weight"  # what the rotary frequencies are divided by: Llama 3's scaling

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
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
    return f"{home}{_NAMES['.'.join(words)]}.{end}", None


def is_permuted(architecture: str, leaf: str) -> bool:
    """Tells whether a leaf's heads are stored for llama.cpp's first rotary embedding, which turns
    neighbours, (0, 1), (2, 3): ours pairs dimension i with i + K/2."""
    words = ("attention.query", "attention.key", "attention.query_bias", "attention.key_bias")
    return architecture == "llama" and leaf.endswith(words)


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
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: np.ndarray | None
) -> DecoderConfig:
    """Returns our configuration of a file.

    Args: metadata: of the file. shapes: of the file's tensors. factors: float32 (K/2,), the tensor
      FACTORS, or None.
    Raises: UserError for what is missing, of a wrong kind, or cannot be computed here.
    """
    kind = architecture(metadata)
    read = _Settings(metadata, kind)
    width, heads = read.count("embedding_length"), read.count("attention.head_count")
    head_width = read.count("attention.key_length", max(1, width // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.count(key, head_width) != head_width:
            raise read.refuse(key, f"it must be {head_width}, the width of a head")
    table = shapes.get("token_embd.weight", ())
    if len(table) != 2:
        raise UserError("it has no table token_embd.weight of two dimensions")
    window = read.get("attention.sliding_window")
    mlp = read.count("feed_forward_length")
    cfg = DecoderConfig(
        layers=read.count("block_count", most=MOST_STACKED),
        width=width,
        heads=heads,
        kv_heads=read.count("attention.head_count_kv", heads),
        head_width=head_width,
        mlp=mlp,
        vocab=table[0],
        norm_eps=read.positive("attention.layer_norm_rms_epsilon"),
        max_positions=read.count("context_length"),
        bias="qkv" if "blk.0.attn_q.bias" in shapes else "none",
        qk_norm=kind.startswith("qwen3"),
        window=read.count("attention.sliding_window") if window else None,
        tied="output.weight" not in shapes,
        rope=_rope(read, head_width, factors),
        moe=_moe(read, kind, mlp),
    )
    read.check_rest()
    return cfg


def _moe(read: _Settings, kind: str, mlp: int) -> MoeConfig:
    if not read.get("expert_count"):
        if kind == "qwen3moe":
            raise read.refuse("expert_count", "an architecture with experts must have some")
        return MoeConfig()
    experts = read.count("expert_count", most=MOST_STACKED)
    width = read.count("expert_feed_forward_length", mlp)
    return MoeConfig(experts, read.count("expert_used_count", most=experts), width)


def _rope(read: _Settings, head_width: int, factors: np.ndarray | None) -> RopeConfig:
    kind = read.get("rope.scaling.type", "none")
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
