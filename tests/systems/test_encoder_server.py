"""Encoders that make vectors or classes: against padded rows, against NumPy; their HTTP server."""

import asyncio
import base64
import contextlib
import functools
import json

import jax
import jsonschema
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.foreign import hf
from megajax.models import encoder
from megajax.models.encoder_config import EncoderConfig
from megajax.systems.encoder import open_encoder
from megajax.systems.server.encoders import EncoderServer, EncoderWork
from megajax.systems.server.launch import serve_encoder
from megajax.systems.server.options import Config, HttpOptions
from tests.models.test_minilm import TEXTS, vector
from tests.models.test_minilm import folder as minilm  # noqa: F401
from tests.systems.server import asgi

SIZES = {"layers": 1, "width": 16, "heads": 2, "mlp": 32, "vocab": 259, "vocab_multiple": 1}
CFG = EncoderConfig(**SIZES, max_positions=32, types=0, head="classify", labels=3, pooler="relu")
LABELS = ("bad", "fair", "good")
SAID = ["x", "", "naïve café", "a text that is longer than the thirty-two tokens that are read"]


@functools.cache
def params(head):
    cfg = CFG if head else EncoderConfig(**{**CFG.__dict__, "head": "none"})
    return cfg, jax.jit(encoder.parts(cfg).init)(jax.random.key(0))


def save(folder, head=True):
    cfg, made = params(head)
    hf.save(made, cfg, folder, tokenizer="bytes", labels=LABELS if head else None)
    return folder


def pooled(folder, mode, *, normalize=False, most=32):
    """Writes sentence-transformers' files."""
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize]
    modules = [
        {"path": "1_Pooling" if k == "Pooling" else "", "type": f"sentence_transformers.models.{k}"}
        for k in kinds
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))


def padded(cfg, made, rows):
    """What the last block gives for each text, computed on padded rows."""
    lengths = np.array([len(r) for r in rows])
    tokens = np.zeros((len(rows), max(lengths)), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    parts = encoder.parts(cfg)
    batch = encoder.pad_batch({"tokens": tokens}, lengths)
    hidden = np.asarray(parts.hidden(made, batch, None, "none")[0], np.float64)
    return [x[:n] for x, n in zip(hidden, lengths, strict=True)], tokens, lengths


@pytest.mark.parametrize("mode, normalize", [("mean_tokens", True), ("cls_token", False)])
def test_vectors_are_those_of_padded_rows(tmp_path, mode, normalize):
    save(tmp_path / "m", head=False)
    pooled(tmp_path / "m", {f"pooling_mode_{mode}": True}, normalize=normalize, most=20)
    opened = open_encoder(hf=str(tmp_path / "m"))
    assert opened.pooling.most == 20 and opened.labels == ()
    loaded = opened.load()
    rows = [loaded.row(text)[0] for text in SAID]
    assert [loaded.row(text)[1] for text in SAID] == [True, True, True, False]
    assert max(map(len, rows)) == 20
    hidden, *_ = padded(opened.cfg, params(False)[1], rows)
    expected = [x.mean(0) if mode == "mean_tokens" else x[0] for x in hidden]
    if normalize:
        expected = [x / np.linalg.norm(x) for x in expected]
    np.testing.assert_allclose(loaded(rows), expected, atol=1e-6)
    many = rows * 40  # several batches
    np.testing.assert_allclose(loaded(many), expected * 40, atol=1e-6)


@pytest.mark.parametrize(
    "mode", [{"pooling_mode_max_tokens": True}, {}, {"pooling_mode": "lasttoken"}]
)
def test_other_poolings_are_refused(tmp_path, mode):
    save(tmp_path / "m", head=False)
    pooled(tmp_path / "m", mode)
    with pytest.raises(UserError, match="pooling_mode_mean_tokens, pooling_mode_cls_token"):
        open_encoder(hf=str(tmp_path / "m"))
    modules = [{"path": "../../etc", "type": "x.Pooling"}]
    (tmp_path / "m" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="must be a folder beside it"):
        open_encoder(hf=str(tmp_path / "m"))
    (tmp_path / "m" / "modules.json").write_text('[{"type": "x.Dense"}]')
    with pytest.raises(UserError, match="'Dense'; this program computes Transformer"):
        open_encoder(hf=str(tmp_path / "m"))


@contextlib.asynccontextmanager
async def serving(folder, **options):
    work = EncoderWork(open_encoder(hf=str(folder)).load(), 8)
    work.start()
    limits = HttpOptions(**{"request_log": False, "max_body": 2**14, **options})
    server = EncoderServer(work, name="tiny", limits=limits)
    async with asgi.client(server.app) as client:
        yield client, work
    assert work.live == 0


def ask(folder, path, bodies, **options):
    async def scenario():
        async with serving(folder, **options) as (client, _):
            return [await client.post(path, json=body) for body in bodies]

    return asyncio.run(scenario())


def test_embeddings_have_openais_forms(tmp_path):
    save(tmp_path / "m", head=False)
    loaded = open_encoder(hf=str(tmp_path / "m")).load()
    rows = [loaded.row(text)[0] for text in SAID]
    ids = [row.tolist() for row in rows]
    bodies = [
        {"input": SAID, "model": "tiny"},
        {"input": SAID, "encoding_format": "base64", "dimensions": 16},
        {"input": ids},
        {"input": ids[0], "user": "me"},
        {"input": SAID[0], "encoding_format": "float"},
    ]
    answers = ask(tmp_path / "m", "/v1/embeddings", bodies)
    assert [a.status_code for a in answers] == [200] * 5
    first, packed, of_ids, one_row, one = (a.json() for a in answers)
    vectors = [d["embedding"] for d in first["data"]]
    np.testing.assert_allclose(vectors, loaded(rows), atol=1e-6)
    assert [d["index"] for d in first["data"]] == [0, 1, 2, 3]
    tokens = sum(map(len, rows))
    assert first["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    raw = [np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in packed["data"]]
    np.testing.assert_array_equal(raw, np.array(vectors, np.float32))
    assert of_ids["data"] == first["data"] and one_row["data"] == one["data"]


def test_classes_and_the_document_of_their_server(tmp_path):
    cfg, made = params(True)
    save(tmp_path / "m")
    opened = open_encoder(hf=str(tmp_path / "m"))
    assert opened.labels == LABELS
    rows = [opened.load().row(text)[0] for text in SAID]
    _, tokens, lengths = padded(cfg, made, rows)
    logits = np.asarray(
        encoder.classify(encoder.parts(cfg), made, {"tokens": tokens}, lengths), np.float64
    )
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    async def scenario():
        async with serving(tmp_path / "m") as (client, _):
            answer = await client.post("/v1/classify", json={"input": SAID})
            gets = [await client.get(p) for p in ("/openapi.json", "/v1/models", "/")]
            return answer.json(), *gets, await client.post("/v1/embeddings", json={"input": "x"})

    answer, document, models, page, other = asyncio.run(scenario())
    chances = np.array([d["probs"] for d in answer["data"]])
    np.testing.assert_allclose(chances, expected, atol=1e-6)
    assert [d["label"] for d in answer["data"]] == [LABELS[i] for i in expected.argmax(1)]
    assert answer["labels"] == [*LABELS] and other.status_code == 404
    assert models.json()["data"][0]["endpoints"] == ["/v1/classify"] and page.status_code == 200
    operation = document.json()["paths"]["/v1/classify"]["post"]
    shape = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, shape)
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate({"input": ["x"], "truncate": False}, body)


def test_work_is_limited_and_stops(tmp_path):
    save(tmp_path / "m", head=False)

    async def scenario():
        async with serving(tmp_path / "m") as (client, work):
            work.live = 9
            many = await client.post("/v1/embeddings", json={"input": "x"})
            work.live = 0
            running = asyncio.create_task(work.run([np.ones(30, np.int32)] * 200))
            while not work.live:
                await asyncio.sleep(0)
            work.stop()
            late = await client.post("/v1/embeddings", json={"input": "x"})
            work.abort()
            await work.join()
            health = await client.get("/health")
            return many.status_code, late.status_code, health.status_code, running.exception()

    many, late, health, error = asyncio.run(scenario())
    assert (many, late, health) == (429, 503, 503)
    assert error is not None and error.code == "stopping"


def test_settings_of_decoders_are_refused_for_an_encoder(tmp_path):
    opened = open_encoder(hf=str(save(tmp_path / "m")))
    with pytest.raises(UserError, match=r"quantize=int8: m is an encoder.*--quantize"):
        serve_encoder(Config(quantize="int8"), opened)


@pytest.mark.slow
def test_vectors_of_minilm_are_those_of_numpy(minilm):  # noqa: F811
    import safetensors.numpy

    theirs = safetensors.numpy.load_file(minilm / "model.safetensors")
    theirs = {n: x.astype(np.float64) for n, x in theirs.items()}
    opened = open_encoder(hf=str(minilm))
    assert (opened.pooling.most, opened.pooling.kind, opened.pooling.normalize) == (
        256,
        "mean",
        True,
    )
    loaded = opened.load()
    rows = [loaded.row(text)[0] for text in TEXTS]
    expected = [vector(theirs, row) for row in rows]
    np.testing.assert_allclose(loaded(rows), expected, atol=1e-5)
