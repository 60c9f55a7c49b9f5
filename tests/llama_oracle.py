"""A Llama's forward pass in NumPy, straight from a GGUF file by the `gguf` package.

It follows llama.cpp: weights stay as the file has them, and the rotary embedding turns neighbouring
dimensions (0, 1), (2, 3). Nothing of it is shared with megajax, which reorders the rows and pairs
dimension i with i + K/2.
"""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize


class Llama:
    """A model of architecture llama with tied embeddings and no scaled rotary embedding."""

    def __init__(self, path: str | Path):
        reader = gguf.GGUFReader(path)
        self._tensors = {t.name: t for t in reader.tensors}
        fields = {k: f.contents() for k, f in reader.fields.items() if k.startswith("llama.")}
        self.layers = fields["llama.block_count"]
        self.heads = fields["llama.attention.head_count"]
        self.groups = fields["llama.attention.head_count_kv"]
        self.eps = fields["llama.attention.layer_norm_rms_epsilon"]
        self.theta = fields["llama.rope.freq_base"]

    def weight(self, name: str) -> np.ndarray:
        """Returns a tensor in float64, rows of inputs."""
        t = self._tensors[f"{name}.weight"]
        shape = tuple(int(n) for n in t.shape)[::-1]
        return dequantize(t.data, t.tensor_type).reshape(shape).astype(np.float64)

    def logits(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns float64 logits (length, vocabulary) of each row, which see only themselves."""
        cuts = np.cumsum([len(row) for row in rows])[:-1]
        table = self.weight("token_embd")
        x = table[np.concatenate([np.asarray(row) for row in rows])]
        places = np.concatenate([np.arange(len(row)) for row in rows])
        for i in range(self.layers):
            x = x + self._attention(i, self._norm(x, f"blk.{i}.attn_norm"), places, cuts)
            h = self._norm(x, f"blk.{i}.ffn_norm")
            gate = h @ self.weight(f"blk.{i}.ffn_gate").T
            up = h @ self.weight(f"blk.{i}.ffn_up").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weight(f"blk.{i}.ffn_down").T
        x = self._norm(x, "output_norm")
        return [part @ table.T for part in np.split(x, cuts)]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.weight(name)

    def _attention(self, i: int, h: np.ndarray, places: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        q, k, v = (h @ self.weight(f"blk.{i}.attn_{n}").T for n in "qkv")
        q = self._rotate(q.reshape(len(h), self.heads, -1), places)
        k = self._rotate(k.reshape(len(h), self.groups, -1), places)
        v = v.reshape(len(h), self.groups, -1)
        k, v = (np.repeat(x, self.heads // self.groups, 1) for x in (k, v))
        out = []
        for a, b, c in zip(*(np.split(x, cuts) for x in (q, k, v)), strict=True):
            scores = np.einsum("qhk,mhk->hqm", a, b) / np.sqrt(a.shape[-1])
            scores = np.where(np.tri(len(a), dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out.append(np.einsum("hqm,mhk->qhk", weights, c).reshape(len(a), -1))
        return np.concatenate(out) @ self.weight(f"blk.{i}.attn_output").T

    def _rotate(self, x: np.ndarray, places: np.ndarray) -> np.ndarray:
        width = x.shape[-1]
        angle = places[:, None] * self.theta ** (-np.arange(0, width, 2) / width)
        rotation = np.exp(1j * angle)[:, None]
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * rotation
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
