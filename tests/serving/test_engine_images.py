"""Prompts with images: the engine against a loop with the whole forward pass, and itself."""

import dataclasses
from concurrent.futures import Future, wait

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.models import decoder
from megajax.serving import Engine, SamplingParams, tiles
from megajax.serving import images as images_
from megajax.serving.forward import Forward
from megajax.serving.programs import OneMesh
from megajax.training import logprobs
from tests.image_loop import CFG, PLACEHOLDER, SMALL, TOWER, one_by_one, picture, requests, sharp
from tests.tiny import MODEL


def answers(engine, asked, params, seed=0):
    """Submits in random order while the engine runs. Returns [(tokens, logprobs)]."""
    random = np.random.default_rng(seed)
    todo, ids = list(random.permutation(len(asked))), {}
    outcomes = [([], []) for _ in asked]
    while todo or engine.busy:
        for _ in range(min(len(todo), int(random.integers(0, 5)))):
            i = todo.pop()
            ids[engine.submit(asked[i][0], params[i], images=asked[i][1])] = i
        for output in engine.step():
            tokens, scores = outcomes[ids[output.request_id]]
            tokens += output.tokens
            scores += output.logprobs
    assert engine.pool.in_use == 0
    assert engine.programs.compiled <= engine.programs.bound
    return outcomes


def greedy(lengths):
    return [SamplingParams(max_tokens=int(n), temperature=0) for n in lengths]


def check_greedy(count, mesh=None, **options):
    asked = requests(count)
    lengths = np.random.default_rng(1).integers(1, 12, count)
    engine = Engine(CFG, sharp(), mesh=mesh, **options)
    outcomes = answers(engine, asked, greedy(lengths))
    for (prompt, images), length, (tokens, _) in zip(asked, lengths, outcomes, strict=True):
        assert tokens == one_by_one(prompt, images, length)
    return engine, asked, outcomes


def digests(images):
    return {(x.shape, x.tobytes()) for x in images}


def test_greedy_is_the_argmax_of_the_whole_pass_with_preemption_and_reuse():
    # No room for features of other requests: each request computes an image once, whatever happens.
    options = SMALL | {"pages": 17, "page_size": 4, "decode_steps": 3, "image_cache": 0}
    engine, asked, outcomes = check_greedy(9, **options)
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.prefix_hits > 0
    assert 0 < engine.tower.computed <= sum(len(digests(images)) for _, images in asked)
    assert engine.tower.compiled <= 2
    rows = [ids + tokens for (ids, _), (tokens, _) in zip(asked, outcomes, strict=True)]
    scores = logprobs(CFG, sharp(), rows, [images for _, images in asked])
    for row, (_, ours), want in zip(rows, outcomes, scores, strict=True):
        assert len(want) == len(row)
        np.testing.assert_allclose(ours, want[-len(ours) :], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}, {"data": 2}])
def test_greedy_of_forty_requests(mesh):
    count = int(np.prod(list(mesh.values()) or [1]))
    mesh = MeshSpec(**({"data": 1} | mesh)).build(jax.devices()[:count])
    options = SMALL | {"pages": 24, "page_size": 4, "decode_steps": 2}
    engine, asked, _ = check_greedy(40, mesh, **options)
    assert engine.scheduler.prefix_hits > 0
    assert engine.scheduler.preemptions > 0 or count > 1
    assert engine.tower.computed <= len(digests([x for _, images in asked for x in images]))


def exact_bits(dtype, count, **options):
    asked = requests(count, seed=2)
    params = [
        SamplingParams(max_tokens=7, seed=i, logit_bias={PLACEHOLDER: 100}) for i in range(count)
    ]
    engine = Engine(CFG, sharp(), dtype=dtype, numerics="exact", **options)
    sampled = answers(engine, asked, params)
    rows = [ids + tokens for (ids, _), (tokens, _) in zip(asked, sampled, strict=True)]
    images = [images for _, images in asked]
    exact = logprobs(CFG, sharp(), rows, images, dtype=dtype, numerics="exact")
    for (_, scores), want in zip(sampled, exact, strict=True):
        np.testing.assert_array_equal(np.float32(scores), want[-7:])
    return sampled


def test_exact_numerics_are_the_trainers_bits():
    exact_bits("bfloat16", 5, max_batch=5, page_size=4, pages=40, prefill_chunk=7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_numerics_over_batches_pages_chunks(dtype):
    runs = [
        exact_bits(dtype, 20, max_batch=batch, page_size=size, pages=40, prefill_chunk=chunk)
        for batch, size, chunk in ((1, 8, None), (7, 4, 7), (20, 16, 13))
    ]
    assert all(each == runs[0] for each in runs)


def run(engine, prompt, images, **params):
    """Returns the tokens of each greedy answer, and how many tokens were not computed anew."""
    before = engine.scheduler.prefix_hits
    params = SamplingParams(**{"max_tokens": 5, "temperature": 0} | params)
    engine.submit(prompt, params, images=images)
    tokens = {}
    for output in engine.run():
        tokens.setdefault(output.index, []).extend(output.tokens)
    return list(tokens.values()), engine.scheduler.prefix_hits - before


def test_the_same_text_reuses_pages_with_the_same_image_alone():
    engine = Engine(CFG, sharp(), **SMALL, page_size=4)
    prompt, first, second = [7, PLACEHOLDER, 8, 9, 4, 5, 6], [picture(1)], [picture(2)]
    answer, hits = run(engine, prompt, first)
    other, none = run(engine, prompt, second)
    assert (hits, none) == (0, 0)
    assert answer == [one_by_one(prompt, first, 5)] != other == [one_by_one(prompt, second, 5)]
    assert run(engine, prompt, first) == (answer, 12)  # 9 tokens show the image
    assert run(engine, prompt, [first[0].copy()]) == (answer, 12)
    # The pixels in another shape are another image.
    turned = [np.ascontiguousarray(picture(1).reshape(16, 36, 3))]
    assert run(engine, prompt, turned)[1] == 0
    # Behind another text nothing is shared but the features.
    behind = [3, PLACEHOLDER, 8]
    assert run(engine, behind, first) == ([one_by_one(behind, first, 5)], 0)
    assert engine.tower.computed == 3, "features of an image are computed once"
    # All answers to a prompt share its image.
    assert run(engine, [*prompt, 1], second, n=3)[0] == 3 * [one_by_one([*prompt, 1], second, 5)]
    assert engine.tower.computed == 3


@pytest.mark.parametrize("n", [1, 2])
def test_several_steps_begin_behind_an_image_that_ends_the_prompt(n):
    engine = Engine(CFG, sharp(), **SMALL | {"prefill_chunk": 18}, page_size=8, decode_steps=3)
    # Before the last token: nothing; a chunk; a prefix of 24 tokens that another prompt had.
    for prompt in ([7, 8, PLACEHOLDER], [*range(10), PLACEHOLDER], [*range(16), PLACEHOLDER]):
        images = [picture(1)]
        for _ in range(2):
            answers, _ = run(engine, prompt, images, n=n)
            assert answers == n * [one_by_one(prompt, images, 5)]
    assert engine.scheduler.prefix_hits >= 24


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_answer_has_a_placeholder(temperature):
    engine, rows, images = _idle(), [], [[picture(1)], None]
    params = SamplingParams(
        max_tokens=6, temperature=temperature, seed=1, logit_bias={PLACEHOLDER: 100}
    )
    for prompt, each in zip(([5, PLACEHOLDER, 8], [5, 8]), images, strict=True):
        engine.submit(prompt, params, images=each)
        rows.append(prompt + [token for output in engine.run() for token in output.tokens])
    assert [row.count(PLACEHOLDER) for row in rows] == [1, 0]
    assert list(map(len, logprobs(CFG, sharp(), rows, images))) == [9, 8]


def test_the_digest_of_an_image_names_how_it_was_cut():
    other = dataclasses.replace(TOWER, max_pixels=64 * 4)
    cut = [images_.picture(picture(1), tower) for tower in (TOWER, TOWER, other)]
    assert cut[0].digest == cut[1].digest != cut[2].digest


def test_features_on_the_host_have_no_padding():
    engine = _idle()
    features_QD = engine.tower.features(engine._params, *engine.see([picture(1)]))
    assert features_QD.shape == (9, CFG.width) and features_QD.base is None


def test_programs_of_images_are_compiled_before_the_first_one():
    forward = Forward(CFG, MeshSpec(data=1).build(jax.devices()[:1]))
    placed = forward.place(sharp(), cast=True)
    tower, other = images_.Tower(forward), images_.Tower(forward)
    ready = tower.prepare(forward.outline(sharp(), cast=True), context=300)
    wait(ready)
    assert tower.compiled == 2  # of 16 and of 32 merged patches
    for image in images_.pictures([picture(1), picture(2, 40, 32)], TOWER):
        np.testing.assert_array_equal(tower.features(placed, image), other.features(placed, image))
    assert tower.compiled == other.compiled == 2
    # What a request needs sooner is not compiled twice.
    behind = Future()
    later = images_.Tower(forward)
    jobs = later.prepare(placed, 300, after=[behind])
    later.features(placed, images_.picture(picture(1), TOWER))
    behind.set_result(None)
    wait(jobs)
    assert [job.cancelled() for job in jobs] == [True, False] and later.compiled == 2


def test_exact_scores_compile_the_tower_once_and_see_new_weights():
    teacher = tiles.Teacher(CFG, MeshSpec(data=1).build(jax.devices()[:1]), "float32")
    changed = sharp() | {"projector": jax.tree.map(lambda x: -x, sharp()["projector"])}
    scores = []
    for params in (sharp(), sharp(), changed):
        row = images_.Images(CFG, [7, PLACEHOLDER, 8], images_.pictures([picture(1)], TOWER))
        scores += teacher(teacher.forward.place(params, cast=True), [row.tokens], [row])
    assert teacher.tower.compiled == 1 and teacher.tower.computed == 3
    assert scores[0][-1] == scores[1][-1] != scores[2][-1]


def test_new_weights_see_images_anew():
    engine = Engine(CFG, sharp(), **SMALL, page_size=4)
    prompt, images = [7, PLACEHOLDER, 8], [picture(1)]
    before, _ = run(engine, prompt, images)
    changed = jax.tree.map(lambda x: x, sharp())
    changed["projector"] = jax.tree.map(lambda x: -x, changed["projector"])
    engine.load(changed, 1)
    after, hits = run(engine, prompt, images)
    assert hits == 0 and after != before and engine.tower.computed == 2
    # Of an image that is half fed, the other half has the new weights' features.
    halves = [picture(3, 40, 32), picture(4, 40, 32)]  # of 20 merged patches
    two = [PLACEHOLDER, PLACEHOLDER, 8]
    engine.submit(two, SamplingParams(max_tokens=1), images=halves)
    engine.step()  # 16 tokens; the next 16 are under way
    assert engine.tower.computed == 4
    engine.load(sharp(), 2)
    assert len(list(engine.run())) == 1 and engine.tower.computed == 5


@pytest.mark.parametrize(
    "prompt, images, message",
    [
        ([1, PLACEHOLDER], [], r"1 placeholders of images \(token 60\) and there are 0 images"),
        ([1, 2], [picture(0)], "0 placeholders .* 1 images: give one placeholder an image"),
        ([PLACEHOLDER], [picture(0)] * 2, "1 placeholders .* 2 images"),
        ([PLACEHOLDER], [np.zeros((8, 8))], r"images\[0\]: an image is uint8 \(H, W, 3\)"),
        ([PLACEHOLDER], [np.zeros((8, 8, 4), np.uint8)], r"images\[0\]: an image is uint8"),
        ([PLACEHOLDER], [np.zeros((0, 8, 3), np.uint8)], r"images\[0\]: the image has 8 x 0"),
        ([PLACEHOLDER], [picture(0, 1, 900)], r"images\[0\]: .* 200 times as long"),
        ([PLACEHOLDER] * 20, [picture(0, 32, 32)] * 20, "320 show the 20 images, .* smaller"),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_refused_by_name(prompt, images, message):
    engine = _idle()
    with pytest.raises(UserError, match=message):
        engine.submit(prompt, images=images)
    assert not engine.busy


def _idle(made=[]):  # noqa: B006
    if not made:
        made.append(Engine(CFG, sharp(), **SMALL))
    return made[0]


def test_a_backend_without_a_tower_refuses_images():
    class Other:  # a backend that is no OneMesh
        def __init__(self, mesh):
            self._mesh = mesh

        def __getattr__(self, name):
            return getattr(self._mesh, name)

    backend = Other(OneMesh(CFG, None, None, "float32", "auto"))
    engine = Engine(CFG, sharp(), **SMALL, backend=backend)
    with pytest.raises(UserError, match="this engine's backend computes no features .*backend"):
        engine.submit([PLACEHOLDER], images=[picture(0)])
    with pytest.raises(UserError, match="this engine's backend computes no features"):
        engine.see([picture(0)])


def test_a_model_that_sees_none_refuses_images():
    params = jax.jit(decoder.parts(MODEL).init)(jax.random.key(0))
    engine = Engine(MODEL, params, **SMALL, context=64)
    with pytest.raises(UserError, match="this model sees none.*VlmConfig.*images"):
        engine.submit([1], images=[picture(0)])
    engine.submit([1], SamplingParams(max_tokens=1), images=None)
    assert len(list(engine.run())) == 1
    with pytest.raises(UserError, match="this model sees none"):
        logprobs(MODEL, params, [[1, 2]], [[picture(0)]])
    with pytest.raises(UserError, match="images has 1 lists and rows 2 rows"):
        logprobs(CFG, sharp(), [[1, 2], [3]], [[]])
    with pytest.raises(UserError, match=r"rows\[1\]: prompt_tokens has 1 placeholders"):
        logprobs(CFG, sharp(), [[1, 2], [PLACEHOLDER]])
