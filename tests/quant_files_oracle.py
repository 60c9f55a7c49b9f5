"""Hugging Face folders in GPTQ's and AWQ's form, written and decoded in NumPy.

From the formats' public definition (AutoGPTQ, GPTQModel, AutoAWQ), with nothing of megajax. A
column or a row of codes is one large Python integer, whose 32-bit digits are the words of the file.

    GPTQ  qweight (K b / 32, N): a column's integer is sum code[k] 2^(b k)
          qzeros (G, N b / 32): a row's integer likewise, of z, in version 1 of (z - 1) mod 2^b
          g_idx (K,): the group of each row
    AWQ   qweight (K, N / 8), qzeros (G, N / 8): 4 bits, word j is sum code[8 j + ORDER[i]] 16^i
    both  scales (G, N), w[k, n] = scales[g, n] (code[k, n] - z[g, n])

The model is a Llama of float64 arithmetic. Legend: K inputs, N outputs, G groups of C rows, b bits.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float16",
}
LINEARS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (128, 64),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (128, 192),
    "mlp.up_proj": (128, 192),
    "mlp.down_proj": (192, 128),
}


def words(codes: Any, bits: int, count: int) -> list[int]:
    """Returns the 32-bit digits of a stream of codes, low first."""
    stream = sum(int(code) << (bits * k) for k, code in enumerate(codes))
    return [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(count)]


def codes(digits: Any, bits: int, count: int) -> list[int]:
    """Returns the codes of such digits."""
    stream = sum((int(digit) & 0xFFFFFFFF) << (32 * i) for i, digit in enumerate(digits))
    return [(stream >> (bits * k)) & (2**bits - 1) for k in range(count)]


def int32(rows: list[list[int]]) -> np.ndarray:
    """Returns words as the files have them."""
    return np.array(rows, np.uint32).view(np.int32)


def gptq(code_KN, zero_GN, scale_GN, group_K, bits: int, version: int) -> dict[str, np.ndarray]:
    """Returns a Linear's tensors."""
    K, N = code_KN.shape
    stored_GN = (zero_GN.astype(int) - (version == 1)) % 2**bits
    return {
        "qweight": int32([words(column, bits, K * bits // 32) for column in code_KN.T]).T.copy(),
        "qzeros": int32([words(row, bits, N * bits // 32) for row in stored_GN]),
        "scales": scale_GN,
        "g_idx": np.asarray(group_K, np.int32),
    }


def awq(code_KN, zero_GN, scale_GN) -> dict[str, np.ndarray]:
    """Returns a Linear's tensors."""

    def word(eight):
        return sum(int(eight[column]) << (4 * i) for i, column in enumerate(ORDER))

    def packed(x_RN):
        return int32([[word(row[j : j + 8]) for j in range(0, len(row), 8)] for row in x_RN])

    return {"qweight": packed(code_KN), "qzeros": packed(zero_GN), "scales": scale_GN}


def decode_gptq(part: Mapping[str, np.ndarray], bits: int, version: int) -> tuple[np.ndarray, ...]:
    """Returns (float64 w (K, N), codes (K, N), zero points (G, N))."""
    K, N = len(part["g_idx"]), part["qweight"].shape[1]
    code_KN = np.array([codes(column, bits, K) for column in part["qweight"].T]).T
    zero_GN = np.array([codes(row, bits, N) for row in part["qzeros"]])
    zero_GN = (zero_GN + (version == 1)) % 2**bits
    scale_GN, g = part["scales"].astype(np.float64), part["g_idx"]
    return scale_GN[g] * (code_KN - zero_GN[g]), code_KN, zero_GN


def decode_awq(part: Mapping[str, np.ndarray], group: int) -> tuple[np.ndarray, ...]:
    """Returns (float64 w (K, N), codes (K, N), zero points (G, N))."""

    def unpacked(x_RW):
        out = np.zeros((len(x_RW), 8 * x_RW.shape[1]), int)
        for i, column in enumerate(ORDER):
            out[:, column::8] = (x_RW.view(np.uint32).astype(int) >> (4 * i)) & 15
        return out

    code_KN, zero_GN = unpacked(part["qweight"]), unpacked(part["qzeros"])
    g = np.arange(len(code_KN)) // (len(code_KN) if group == -1 else group)
    return part["scales"].astype(np.float64)[g] * (code_KN - zero_GN[g]), code_KN, zero_GN


@dataclass
class Spec:
    """What a folder holds. of: {module: (bits, group)}, or None where it stays dense; by default
    all of `bits` and `group`. order: whether the rows of a group lie apart (desc_act). shards:
    files. head: whether lm_head is quantized too. more: members of quantization_config."""

    method: str = "gptq"
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    version: int = 2
    order: bool = False
    scales: Any = np.float16
    shards: int = 1
    head: bool = False
    tied: bool = False
    of: Callable[[str], tuple[int, int] | None] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    g_idx: bool = True


def section(spec: Spec) -> dict[str, Any]:
    """Returns the quantization_config."""
    if spec.method == "awq":
        members = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": spec.group,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": None,
        }
    else:
        form = "gptq" if spec.version == 1 else "gptq_v2"
        members = {
            "quant_method": "gptq",
            "checkpoint_format": form,
            "bits": spec.bits,
            "group_size": spec.group,
            "desc_act": spec.order,
            "sym": spec.symmetric,
            "lm_head": spec.head,
        }
    return members | spec.more


def linear(
    rng: np.random.Generator, shape: tuple[int, int], spec: Spec, bits: int, group: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns (the tensors of a random Linear, float64 w (K, N))."""
    K, N = shape
    C = K if group == -1 else group
    G = -(-K // C)
    code_KN = rng.integers(0, 2**bits, shape)
    zero_GN = np.full((G, N), 2 ** (bits - 1))
    if not spec.symmetric:
        zero_GN = rng.integers(0, 2**bits, (G, N))
        zero_GN[0, :3] = 0, 2**bits - 1, 1
    scale_GN = (rng.uniform(0.5, 1.5, (G, N)) * 0.3 / 2**bits).astype(spec.scales)
    group_K = np.arange(K) // C
    if spec.order:
        rng.shuffle(group_K)
    if spec.method == "awq":
        part = awq(code_KN, zero_GN, scale_GN)
    else:
        part = gptq(code_KN, zero_GN, scale_GN, group_K, bits, spec.version)
        if not spec.g_idx:
            part.pop("g_idx")
    return part, scale_GN.astype(np.float64)[group_K] * (code_KN - zero_GN[group_K])


def write(path: Path, spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes a folder. Returns {name of a weight: float64, Linears as (K, N)}."""
    rng = np.random.default_rng(seed)
    tensors, weights = {}, {}

    def keep(name: str, x: np.ndarray, transposed: bool = False) -> None:
        stored = np.ascontiguousarray(x.T if transposed else x).astype(np.float16)
        tensors[f"{name}.weight"] = stored
        weights[name] = stored.astype(np.float64).T if transposed else stored.astype(np.float64)

    def put(name: str, shape: tuple[int, int], how: tuple[int, int] | None) -> None:
        if how is None:
            keep(name, rng.normal(0, 0.1, shape), transposed=True)
            return
        part, weights[name] = linear(rng, shape, spec, *how)
        tensors.update({f"{name}.{end}": x for end, x in part.items()})

    default = spec.bits, spec.group
    keep("model.embed_tokens", rng.normal(0, 1, (96, 128)))
    for layer in range(2):
        home = f"model.layers.{layer}"
        for name, shape in LINEARS.items():
            put(f"{home}.{name}", shape, spec.of(f"{home}.{name}") if spec.of else default)
        for name in ("input_layernorm", "post_attention_layernorm"):
            keep(f"{home}.{name}", rng.uniform(0.5, 1.5, 128))
    keep("model.norm", rng.uniform(0.5, 1.5, 128))
    if spec.tied:
        weights["lm_head"] = weights["model.embed_tokens"].T
    else:
        put("lm_head", (128, 96), default if spec.head else None)
    save(
        path,
        tensors,
        CONFIG | {"tie_word_embeddings": spec.tied} | {"quantization_config": section(spec)},
        spec.shards,
    )
    return weights


def save(path: Path, tensors: Mapping[str, np.ndarray], config: Any, shards: int = 1) -> None:
    """Writes tensors and config.json; several shards with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        safetensors.numpy.save_file(dict(tensors), path / "model.safetensors")
        return
    homes = {}
    for i in range(shards):  # a Linear's tensors lie in different files
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(tensors)[i::shards]
        safetensors.numpy.save_file({n: tensors[n] for n in names}, path / file)
        homes |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": homes}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of all files of a folder."""
    return {
        name: x
        for file in sorted(path.glob("*.safetensors"))
        for name, x in safetensors.numpy.load_file(file).items()
    }


def logits(weights: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Returns float64 logits (S, V) of one row of tokens."""
    S, half = len(tokens), 32
    angle = np.arange(S)[:, None] * 10000.0 ** (-np.arange(half) / half)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights[name]

    def turned(x_SHK):
        z = (x_SHK[..., :half] + 1j * x_SHK[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    x = weights["model.embed_tokens"][tokens]
    for i in range(2):
        home = f"model.layers.{i}"
        w = {name: weights[f"{home}.{name}"] for name in LINEARS}
        h = norm(x, f"{home}.input_layernorm")
        q = turned((h @ w["self_attn.q_proj"]).reshape(S, 2, 64))
        k = turned((h @ w["self_attn.k_proj"]).reshape(S, 1, 64))
        v = (h @ w["self_attn.v_proj"]).reshape(S, 1, 64)
        scores = np.einsum("qhk,mgk->hqm", q, k) / 8.0
        scores = np.where(np.tri(S, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqm,mgk->qhk", p, v).reshape(S, 128) @ w["self_attn.o_proj"]
        h = norm(x, f"{home}.post_attention_layernorm")
        gate = h @ w["mlp.gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj"])) @ w["mlp.down_proj"]
    return norm(x, "model.norm") @ weights["lm_head"]
