"""Exact match of vision-language models: what counts, and greedy answers."""

import dataclasses
import io
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.data.tokenizer import ByteTokenizer
from megajax.data.vision import Dialogue, Drawn, Sample, fixed_rows
from megajax.foreign import hf
from megajax.models import vlm
from megajax.parallel import sharding
from megajax.training import vision
from megajax.training.vision import (
    Predictor,
    exact,
    greedy,
    most_frequent,
    nano,
    page,
    take_model,
)
from tests.foreign.test_hf import unpack


def small() -> vision.VisionConfig:
    """nano with one layer each."""
    base = nano()
    decoder = dataclasses.replace(base.model.decoder, layers=1, width=32, mlp=48, vocab=512)
    tower = dataclasses.replace(base.model.tower, layers=1, width=16, heads=2, mlp=16)
    model = dataclasses.replace(base.model, decoder=decoder, tower=tower)
    train = dataclasses.replace(base.train, global_batch=2, seq_len=48)
    return dataclasses.replace(base, model=model, train=train)


CFG = small()


def samples(count: int) -> list:
    dialogue = Dialogue(ByteTokenizer(), CFG.model.image_token)
    drawn = Drawn(dialogue, 0, 0.1, True, CFG.model.tower)
    return [drawn.sample(k) for k in range(count)]


def test_a_sample_counts_if_all_its_tokens_are_right():
    row = {
        "targets": np.array([-1, 5, 6, -1, 7, 8, -1, -1]),
        "segments": np.array([1, 1, 1, 2, 2, 3, 3, -1]),
    }
    tops = np.array([[9, 5, 6, 9, 7, 9, 9, 9], [9, 5, 9, 9, 7, 8, 9, 9]])
    right = exact(tops, [(row, [0, 1, 2]), (row, [3, 4, 5])], 6)
    assert right.tolist() == [True, True, False, False, True, True]


def test_the_most_frequent_answer_is_of_each_question():
    made = samples(1)[0]

    def sample(kind: str, question: str, answer: str):
        return dataclasses.replace(made, kind=kind, question=question, answer=answer)

    a = [("x", "p", "1"), ("x", "p", "1"), ("x", "p", "2"), ("y", "q", "2")]
    assert most_frequent([sample(*s) for s in a]) == [1, 1, 0, 1]
    assert most_frequent([sample("x", q, n) for _, q, n in a]) in ([1, 1, 0, 0], [0, 0, 1, 1])


def test_answers_are_those_of_a_loop_that_decodes_token_by_token():
    mesh = MeshSpec(data=4).build(jax.devices()[:4])
    layout = sharding.layout(mesh, "full", model=CFG.model)
    with jax.set_mesh(mesh):
        parts = vlm.parts(CFG.model, layout)
        stored = jax.tree.map(
            lambda w, words: jax.sharding.NamedSharding(mesh, layout.stored(*words)),
            parts.abstract,
            parts.axes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        params = jax.jit(parts.init, out_shardings=stored)(jax.random.key(3))
    params = jax.tree.map(lambda w: 4 * w, params)  # answers that are not all alike
    predictor = Predictor(CFG, layout)
    chosen = samples(5)
    rows = [r for r, _ in fixed_rows(chosen, CFG.data, 48, CFG.model, False)]
    tops, nats = predictor(params, rows)

    one = jax.tree.map(jax.numpy.asarray, jax.device_get(params))
    plain = vlm.parts(CFG.model)
    forward = jax.jit(lambda batch: plain.logits(one, batch))
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    logits = np.asarray(forward(batch), np.float64)[..., : CFG.model.vocab]
    assert (tops == logits.argmax(-1))[batch["segments"] > 0].all()
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    true = np.take_along_axis(logs, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(nats, np.where(batch["targets"] >= 0, -true, 0), atol=2e-5)

    cfg = dataclasses.replace(CFG, eval=dataclasses.replace(CFG.eval, sample_tokens=4))
    answers = greedy(predictor, params, chosen, cfg, ByteTokenizer())
    for sample, answer in zip(chosen, answers, strict=True):
        row = fixed_rows([sample], CFG.data, 48, CFG.model, False)[0][0]
        first = int(np.flatnonzero(row["targets"] >= 0)[0])
        ids: list[int] = []
        for at in range(first, first + 4):
            row["segments"][: at + 1] = 1
            row["segments"][at + 1 :] = -1
            row["positions"][: at + 1] = np.arange(at + 1)
            if at > first:
                row["tokens"][at] = ids[-1]
                row["rotary"][at] = row["rotary"][at - 1] + 1
            logits = forward({name: x[None] for name, x in row.items()})[0, at]
            ids.append(int(np.asarray(logits)[: CFG.model.vocab].argmax()))
            if ids[-1] == 257:
                ids.pop()
                break
        assert answer == ByteTokenizer().decode(ids)
    assert len({*answers}) > 1


def test_evaluation_has_few_rows_and_a_part_of_the_logits_at_a_time(monkeypatch):
    layout = sharding.layout(MeshSpec().build(jax.devices()[:1]), "full", model=CFG.model)
    with jax.set_mesh(layout.mesh):
        params = jax.jit(vlm.parts(CFG.model, layout).init)(jax.random.key(3))
    rows = [r for r, _ in fixed_rows(samples(5), CFG.data, 48, CFG.model, False)]
    tops, nats = Predictor(CFG, layout)(params, rows)
    assert len(tops) > 1
    monkeypatch.setattr(vision, "PLACES", 200)
    monkeypatch.setattr(vision, "LOGITS", 11 * CFG.model.padded_vocab)
    seen, shapes = set(), []

    def traced(*args):
        seen.add(args[-2])
        return attend(*args)

    def head(parts):
        def sized(params, x_BSD):
            shapes.append(x_BSD.shape[:2])
            return parts.head(params, x_BSD)

        return dataclasses.replace(parts, head=sized)

    attend, make = vision.attend, vlm.parts
    monkeypatch.setattr(vision, "attend", traced)
    monkeypatch.setattr(vlm, "parts", lambda *args, **more: head(make(*args, **more)))
    few = Predictor(config.override(CFG, {"train.attention": "varlen"}), layout)(params, rows)
    assert (few[0] == tops)[np.stack([row["segments"] for row in rows]) > 0].all()
    np.testing.assert_allclose(few[1], nats, atol=2e-5)
    assert seen == {"varlen"}
    assert {*shapes} == {(1, 11), (1, 4)}  # 48 = 4 x 11 + 4


def test_an_answer_behind_an_image_goes_on_after_its_largest_position():
    token, seen = CFG.model.image_token, []
    image = np.zeros((56, 112, 3), np.uint8)  # 2 x 4 merged patches
    tokens, targets = np.array([5, token, 65, 66]), np.array([-1, 65, 66, -1])
    sample = Sample(tokens, targets, [image], "all", "", "AB")

    def predictor(params, rows):
        seen.extend(rows)
        return np.zeros((len(rows), 48), np.int32), None

    greedy(predictor, {}, [sample], CFG, ByteTokenizer())
    assert seen[0]["places"][8:10].tolist() == [7, -1]
    assert seen[0]["rotary"][8:11].tolist() == [[1, 2, 4], [5, 5, 5], [6, 6, 6]]


def test_the_page_shows_each_sample():
    chosen = samples(5)
    answers = [s.answer for s in chosen[:3]] + ["wrong", "no"]
    picture = np.asarray(Image.open(io.BytesIO(page(chosen, answers))).convert("RGB"))
    assert picture.shape == (2 * 210, 4 * 300, 3)
    green, red = ((picture == color).all(-1) for color in ((0x1A, 0x7F, 0x37), (0xCF, 0x22, 0x2E)))
    assert green[:210, :900].any() and not green[210:].any()
    assert red[:210, 900:].any() and red[210:, :300].any()


def test_what_images_cannot_do_is_refused():
    sizes = dict.fromkeys(("pipe", "node", "data", "expert", "context", "tensor"), 1)
    CFG.check(sizes)
    with pytest.raises(UserError, match=r"mesh.context=2: .*--mesh.context"):
        CFG.check({**sizes, "context": 2})
    with pytest.raises(UserError, match=r"data.patches=144 must be .*--data.patches"):
        CFG.check({**sizes, "tensor": 16})
    with pytest.raises(UserError, match=r"encoder.schedule=later"):
        config.override(CFG, {"encoder.schedule": "later"})


def test_a_folder_of_weights_brings_its_model(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "start_given", lambda: False)
    unpack("qwen2_vl", tmp_path)
    flags = {
        "init_from": str(tmp_path),
        "data.tokenizer": "bytes",
        "model.tower.max_pixels": 28 * 280,
    }
    base = config.override(nano(), {"init_from": str(tmp_path)})
    cfg = config.override(take_model(base, flags, {}), flags)
    theirs = hf.load_config(tmp_path)
    assert isinstance(theirs, vlm.VlmConfig)
    assert dataclasses.replace(cfg.model, tower=theirs.tower) == theirs
    assert cfg.model.tower.max_pixels == 28 * 280 and cfg.train.seq_len == 4096
    with pytest.raises(UserError, match="has no tokenizer .*--data.tokenizer=bytes"):
        take_model(base, {"init_from": str(tmp_path)}, {})
    layout = sharding.layout(MeshSpec().build(jax.devices()[:1]), "full", model=cfg.model)
    loaded = cfg.given_params(layout, {})
    stored = dict(named_leaves(hf.load_params(tmp_path, theirs, layout)))
    assert stored and all((x == stored[name]).all() for name, x in named_leaves(loaded))
    unpack("llama", tmp_path / "text")
    with pytest.raises(UserError, match="holds no vision-language model"):
        take_model(base, {"init_from": str(tmp_path / "text"), "data.tokenizer": "bytes"}, {})


def test_a_resumed_run_has_the_same_patches():
    """What decides how an image becomes tokens is a fact of the data, of drawings too."""
    console = SimpleNamespace(say=lambda text: None)

    def identity(**changes):
        cfg = config.override(CFG, changes)
        return vision.Samples(cfg, console, None).identity  # type: ignore[arg-type]

    base = identity()
    for change in ({"model.tower.max_pixels": 28 * 28 * 5}, {"model.image_token": 510}):
        assert identity(**change) != base
    assert identity() == base
