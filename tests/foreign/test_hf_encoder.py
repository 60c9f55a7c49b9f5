"""Encoders in and out against transformers: logits frozen by tests/golden/make_hf.py."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.core.errors import UserError
from megajax.core.tree import named_leaves
from megajax.foreign import hf
from megajax.layers.ops import Ops
from megajax.models import encoder, encoder_names
from megajax.models.encoder_config import PRESETS, EncoderConfig
from tests.foreign.test_hf import assert_same, edit, unpack

FAMILIES = ["bert", "roberta", "distilbert", "albert"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, tmp_path):
    """Per valid token; on padded rows, for tests/models/test_encoder.py has packed = padded."""
    golden, _ = unpack(name, tmp_path)
    cfg, params = hf.load(tmp_path)
    batch = {k: golden[k] for k in ("tokens", "types")}
    run = jax.jit(functools.partial(encoder.logits, encoder.parts(cfg, ops=Ops())))
    logits = np.asarray(run(params, batch, golden["lengths"]))[..., : cfg.vocab]
    live = np.arange(logits.shape[1]) < golden["lengths"][:, None]
    assert np.abs(golden["logits"]).max() > 1.0
    np.testing.assert_allclose(logits[live], golden["logits"][live], atol=2e-4)


@pytest.mark.parametrize(
    "name", [n if n == "distilbert" else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_classes_are_those_of_transformers(name, tmp_path):
    golden, _ = unpack(f"{name}_classify", tmp_path)
    cfg, params = hf.load(tmp_path)
    assert isinstance(cfg, EncoderConfig) and (cfg.head, cfg.labels) == ("classify", 3)
    batch = {k: golden[k] for k in ("tokens", "types")}
    run = jax.jit(functools.partial(encoder.classify, encoder.parts(cfg, ops=Ops())))
    logits = np.asarray(run(params, batch, golden["lengths"]))
    np.testing.assert_allclose(logits, golden["logits"], atol=2e-4)


@pytest.mark.parametrize("name", [*FAMILIES, *(f"{n}_classify" for n in FAMILIES)])
def test_export_is_bit_for_bit(name, tmp_path):
    """Their tensors -> ours -> their tensors -> ours again."""
    _, tensors = unpack(name, tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    leaves = dict(named_leaves(params))
    assert set(leaves) == {rule.ours for rule in encoder_names.rules(cfg)}
    hf.save(params, cfg, tmp_path / "ours")
    exported = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert set(exported) == set(tensors)
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(exported[key], tensor, err_msg=key)
    again, params2 = hf.load(tmp_path / "ours")
    assert again == cfg
    assert_same(params, params2)


@pytest.mark.parametrize("name", list(PRESETS))
def test_config_json_round_trip(name):
    for changes in ({}, {"head": "classify", "labels": 5}, {"head": "none"}):
        cfg = dataclasses.replace(PRESETS[name](), **changes)
        written = json.loads(json.dumps(encoder_names.to_hf_config(cfg, "bfloat16")))
        assert encoder_names.from_hf_config(written) == cfg


@pytest.mark.parametrize(
    "members, names",
    [
        ({}, "LABEL_0 LABEL_1"),
        ({"num_labels": 3}, "LABEL_0 LABEL_1 LABEL_2"),
        ({"id2label": {"1": "no", "0": "yes"}}, "yes no"),
        ({"id2label": {"0": "yes", "1": "no"}, "label2id": {"no": 1, "yes": 0}}, "yes no"),
        ({"id2label": {"0": "x", "1": "x"}, "num_labels": 2}, "x x"),
        ({"id2label": {"0": "yes", "1": "no"}, "label2id": {"no": 0, "yes": 1}}, None),
        ({"id2label": {"0": "yes", "1": "no"}, "num_labels": 3}, None),
        ({"id2label": {"0": "yes", "2": "no"}}, None),
        ({"id2label": {"0": "yes", "1": 7}}, None),
        ({"id2label": {}}, None),
    ],
)
def test_names_of_classes_come_from_config_json(members, names):
    """As transformers 5.24 reads them (LABEL_0, ... where there are none), or refused by name."""
    if names is None:
        with pytest.raises(UserError, match="config.json: (id2label|num_labels)"):
            encoder_names.label_names(members)
    else:
        assert encoder_names.label_names(members) == tuple(names.split())


def test_an_export_names_the_classes(tmp_path):
    cfg = EncoderConfig(layers=1, width=16, heads=2, mlp=32, vocab=128, head="classify", labels=3)
    params = encoder.parts(cfg).init(jax.random.key(0))
    hf.save(params, cfg, tmp_path / "out", labels=["no", "10", "yes"])
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["id2label"] == {"0": "no", "1": "10", "2": "yes"}
    assert written["label2id"] == {"no": 0, "10": 1, "yes": 2}
    assert hf.load_labels(tmp_path / "out") == ("no", "10", "yes")
    assert hf.load_config(tmp_path / "out") == cfg
    with pytest.raises(UserError, match="2 names cannot name the 3 classes"):
        hf.save(params, cfg, tmp_path / "other", labels=["no", "yes"])


@pytest.mark.parametrize("name", FAMILIES)
def test_networks_without_a_head_have_no_prefix(name, tmp_path):
    """What BertModel and its relatives save; also with a prefix, and with a head to ignore."""
    _, tensors = unpack(name, tmp_path)
    full = hf.load(tmp_path)[1]
    body = {n: x for n, x in tensors.items() if n.startswith(f"{name}.")}
    bare = {n.removeprefix(f"{name}."): x for n, x in body.items()}
    width = bare["embeddings.LayerNorm.weight"].shape
    bare["pooler.weight" if name == "albert" else "pooler.dense.weight"] = np.ones(width)
    edit(tmp_path, architectures=[encoder_names._CLASSES[name] + "Model"])
    for loaded in (bare, body, tensors):
        safetensors.numpy.save_file(loaded, tmp_path / "model.safetensors")
        cfg, params = hf.load(tmp_path)
        assert cfg.head == "none" and not set(params) & set(encoder.HEAD)
        assert_same(params, {k: x for k, x in full.items() if k not in encoder.HEAD})
    hf.save(params, cfg, tmp_path / "ours")
    assert hf.load_config(tmp_path / "ours") == cfg
    assert_same(hf.load(tmp_path / "ours")[1], params)


@pytest.mark.parametrize(
    "name", [n if n == "bert" else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_a_head_may_have_been_saved_with_a_body_that_has_no_prefix(name, tmp_path):
    _, tensors = unpack(f"{name}_classify", tmp_path)
    full = hf.load(tmp_path)[1]
    bare = {n.removeprefix(f"{name}."): x for n, x in tensors.items()}
    safetensors.numpy.save_file(bare, tmp_path / "model.safetensors")
    assert_same(hf.load(tmp_path)[1], full)


def test_vectors_of_sentences_are_means_over_their_tokens(tmp_path):
    """On padded rows and packed, against NumPy's mean of the last block's output."""
    golden, _ = unpack("bert", tmp_path)
    edit(tmp_path, architectures=["BertModel"])
    cfg, params = hf.load(tmp_path)
    parts = encoder.parts(cfg, ops=Ops())
    batch = {k: golden[k] for k in ("tokens", "types")}
    lengths = golden["lengths"]
    x = np.asarray(encoder.logits(parts, params, batch, lengths))
    means = np.stack([row[:n].mean(0) for row, n in zip(x, lengths, strict=True)])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    embedded = encoder.embed(parts, params, batch, lengths)
    np.testing.assert_allclose(embedded, expected, atol=1e-6)
    packed = encoder.embed(parts, params, batch, lengths, int(lengths.sum()) + 3)
    np.testing.assert_allclose(packed, expected, atol=1e-5)


def test_without_a_head_there_is_no_loss(tmp_path):
    unpack("bert", tmp_path)
    edit(tmp_path, architectures=["BertModel"])
    cfg, params = hf.load(tmp_path)
    x = jax.numpy.ones((1, 2, cfg.width))
    with pytest.raises(UserError, match="model.head=none has no loss"):
        encoder.parts(cfg, ops=Ops()).head_loss(params, x, {"targets": np.zeros((1, 2), np.int32)})


def test_the_first_berts_files_are_read(tmp_path):
    """gamma and beta, the pooler, next-sentence prediction, copies of what is tied."""
    _, tensors = unpack("bert", tmp_path)
    cfg, params = hf.load(tmp_path)
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for key, tensor in tensors.items():
        end = ".".join(key.split(".")[-2:])
        old[key.removesuffix(end) + names.get(end, end)] = tensor
    old |= {
        "bert.pooler.dense.weight": np.ones((32, 32), np.float32),
        "cls.seq_relationship.bias": np.ones(2, np.float32),
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
        "bert.embeddings.position_ids": np.arange(32)[None],
    }
    safetensors.numpy.save_file(old, tmp_path / "model.safetensors")
    edit(tmp_path, architectures=["BertForPreTraining"])
    assert hf.load_config(tmp_path) == cfg
    assert_same(hf.load(tmp_path)[1], params)


@pytest.mark.parametrize(
    ("name", "copy", "original"),
    [
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("roberta", "lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
        ("roberta", "lm_head.decoder.bias", "lm_head.bias"),
        ("distilbert", "vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
        ("albert", "predictions.decoder.weight", "albert.embeddings.word_embeddings.weight"),
    ],
)
def test_copies_of_tied_tensors_are_equal_or_refused(name, copy, original, tmp_path):
    _, tensors = unpack(name, tmp_path)
    params = hf.load(tmp_path)[1]
    for step in (0, 1):
        again = tensors | {copy: tensors[original] + np.float32(step)}
        safetensors.numpy.save_file(again, tmp_path / "model.safetensors")
        if not step:
            assert_same(hf.load(tmp_path)[1], params)
            continue
        with pytest.raises(UserError, match=f"{copy} differs from {original}"):
            hf.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bert", {"model_type": "deberta"}, "model_type 'deberta' is not one of gpt2, llama"),
        ("bert", {"hidden_act": "silu"}, "hidden_act=silu is not supported, only gelu, "),
        ("bert", {"position_embedding_type": "relative_key"}, "only absolute"),
        ("bert", {"is_decoder": True}, "is_decoder=True is not supported"),
        ("bert", {"intermediate_size": 96}, "has shape"),
        ("bert", {"num_hidden_layers": 1}, "this family does not know: bert.encoder.layer.1"),
        ("albert", {"num_hidden_groups": 3}, "num_hidden_groups=3 must divide 4 layers"),
        ("albert", {"inner_group_num": 2}, "inner_group_num=2 is not supported, only 1"),
    ],
)
def test_folders_that_cannot_be_read_are_refused(name, changes, words, tmp_path):
    unpack(name, tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        hf.load(tmp_path)
    assert words in str(error.value)


def test_an_encoder_is_not_a_decoder(tmp_path):
    unpack("bert", tmp_path)
    with pytest.raises(UserError, match=r"holds an encoder \(bert\); this program runs decoders"):
        hf.load_decoder_config(tmp_path)
    with pytest.raises(UserError, match="types is 2 there, 0 here"):
        hf.load_params(tmp_path, dataclasses.replace(hf.load_config(tmp_path), types=0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repeats": 2}, r"like bert, but \['repeats 2'\]"),
        ({"types": 0}, "like distilbert, but"),
        ({"embed_width": 64, "types": 0}, "no token types"),
    ],
)
def test_a_shape_without_a_family_is_refused(changes, words, tmp_path):
    cfg = dataclasses.replace(EncoderConfig(), **changes)
    with pytest.raises(UserError, match=words):
        hf.save({}, cfg, tmp_path / "out")
