"""Writes GGUF files by hand from the format's specification, hostile ones too."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

SCALARS = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<?"),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
}


class Typed(NamedTuple):
    """A value of a named type: of SCALARS, 'text', or 'array' of them by `[...]`."""

    kind: str
    value: Any


class Raw(NamedTuple):
    """The bytes of a value, with its type, as they stand."""

    code: bytes


class Tensor(NamedTuple):
    """A tensor. sizes: the fastest first, as the file has them. at: its offset; None: the next."""

    name: str
    sizes: Sequence[int]
    kind: int
    data: bytes
    at: int | None = None


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def _guess(value: Any) -> Typed:
    if isinstance(value, bool):
        return Typed("bool", value)
    if isinstance(value, int):
        return Typed("u32", value)
    if isinstance(value, float):
        return Typed("f32", value)
    return Typed("text", value)


def value(item: Any) -> bytes:
    """Returns a value with its type."""
    if isinstance(item, Raw):
        return item.code
    if isinstance(item, list):
        kinds = [x if isinstance(x, Typed) else _guess(x) for x in item]
        kind = kinds[0].kind if kinds else "i32"
        number = 8 if kind == "text" else SCALARS[kind][0]
        body = b"".join(_body(x) for x in kinds)
        return struct.pack("<IIQ", 9, number, len(item)) + body
    typed = item if isinstance(item, Typed) else _guess(item)
    number = 8 if typed.kind == "text" else SCALARS[typed.kind][0]
    return struct.pack("<I", number) + _body(typed)


def _body(typed: Typed) -> bytes:
    if typed.kind == "text":
        return text(typed.value)
    return struct.pack(SCALARS[typed.kind][1], typed.value)


def gguf(
    pairs: dict[str, Any] | list[tuple[str, Any]],
    tensors: Sequence[Tensor] = (),
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Returns a file. counts: of tensors and of pairs, where they are to be wrong."""
    items = list(pairs.items()) if isinstance(pairs, dict) else pairs
    data = b"GGUF" + struct.pack("<I", version)
    data += struct.pack("<QQ", *(counts or (len(tensors), len(items))))
    for key, x in items:
        data += text(key) + value(x)
    offset = 0
    for t in tensors:
        at = offset if t.at is None else t.at
        data += text(t.name) + struct.pack("<I", len(t.sizes))
        data += b"".join(struct.pack("<Q", n) for n in t.sizes)
        data += struct.pack("<IQ", t.kind, at)
        offset = -(-(at + len(t.data)) // alignment) * alignment
    for t in tensors:
        data += bytes(-len(data) % alignment) + t.data
    return data


def f32(name: str, array: np.ndarray) -> Tensor:
    """Returns a tensor of float32."""
    x = np.ascontiguousarray(array, np.float32)
    return Tensor(name, x.shape[::-1], 0, x.tobytes())


def byte_letters() -> list[str]:
    """Returns the letter that byte-level BPE has for each byte (GPT-2, encoder.py)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(spare)) for b in range(256)]


def vocabulary(merges: Sequence[str] = ("h e", "l l", "he ll", "Ġ w")) -> dict[str, Any]:
    """Returns the metadata of a byte-level tokenizer: 256 bytes, what the merges make, two special
    tokens."""
    tokens = byte_letters() + [m.replace(" ", "") for m in merges] + ["<|begin|>", "<|end|>"]
    n = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.token_type": [Typed("i32", 1)] * (n - 2) + [Typed("i32", 3)] * 2,
        "tokenizer.ggml.bos_token_id": n - 2,
        "tokenizer.ggml.eos_token_id": n - 1,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}"
        "<|end|>{% endfor %}",
    }


def llama(**changes: Any) -> dict[str, Any]:
    """Returns the metadata of a small Llama: 2 layers, width 32, 4 heads of 8 over 2."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
    }
    return metadata | changes


def llama_tensors(rng: np.random.Generator, vocab: int = 262) -> list[Tensor]:
    """Returns the tensors of `llama`, drawn at random."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, 32), "output_norm": (32,)}
    for i in range(2):
        for name, shape in (
            ("attn_norm", (32,)),
            ("ffn_norm", (32,)),
            ("attn_q", (32, 32)),
            ("attn_k", (16, 32)),
            ("attn_v", (16, 32)),
            ("attn_output", (32, 32)),
            ("ffn_gate", (64, 32)),
            ("ffn_up", (64, 32)),
            ("ffn_down", (32, 64)),
        ):
            shapes[f"blk.{i}.{name}"] = shape
    return [f32(f"{n}.weight", rng.standard_normal(s) * 0.1) for n, s in shapes.items()]


def in_four_bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors with the blocks' matrices in Q4_0, by the gguf package."""
    import gguf as theirs

    kind, made = theirs.GGMLQuantizationType.Q4_0, []
    for tensor in tensors:
        if len(tensor.sizes) == 2 and tensor.name.startswith("blk."):
            x = np.frombuffer(tensor.data, np.float32).reshape(tensor.sizes[::-1])
            data = theirs.quants.quantize(x, kind).tobytes()
            tensor = tensor._replace(kind=int(kind), data=data)
        made.append(tensor)
    return made
