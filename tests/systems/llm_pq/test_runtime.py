"""A pipeline of unlike stages against one engine with the whole model."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.quant import Format, quantize_model
from megajax.serving import Engine, SamplingParams
from megajax.systems.llm_pq import Runtime, StageError, stages
from megajax.systems.llm_pq import runtime as runtime_
from tests.plain_loop import prompts_of, sharp
from tests.tiny import MODEL, RICH

CFG = dataclasses.replace(MODEL, layers=5, max_positions=64)
FEW = dataclasses.replace(CFG, layers=3)
FLOAT32 = {"dtype": "float32", "page_size": 4}


@dataclasses.dataclass(frozen=True)
class Placement:
    stages: tuple
    bits: tuple
    prefill_batch: int
    decode_batch: int


# Stages of 1 and 2 layers in another order than the devices', of which number 1 is unused.
SHORT = Placement(((2, 0, 1), (0, 1, 3)), (16, 4, 4), 2, 6)


@functools.cache
def quantized(cfg, bits):
    formats = [None if b == 16 else Format(b, 128, 0, scale_dtype="float16") for b in bits]
    return quantize_model(sharp(cfg), cfg, formats)


def on_one_device(cfg, bits, prompts, params, **options):
    """The oracle: each request's answers, one after the other."""
    engine = Engine(cfg, quantized(cfg, bits), **FLOAT32 | {"max_batch": 8} | options)
    ids = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
    answers = {id: [[] for _ in range(p.n)] for id, p in zip(ids, params, strict=True)}
    for output in engine.run():
        answers[output.request_id][output.index] += output.tokens
    return [answer for id in ids for answer in answers[id]]


def traffic(count, longest, seed=0):
    """Greedy and sampled requests of different length."""
    random = np.random.default_rng(seed)
    prompts = prompts_of(count, longest, CFG.vocab, seed)
    params = [
        SamplingParams(max_tokens=int(random.integers(2, 9)), temperature=float(k % 2))
        for k in range(count)
    ]
    return prompts, params


@functools.cache
def few():
    """Requests for FEW and their answers: penalties, a bias, three answers of a prompt."""
    prompts, params = traffic(5, 7)
    params[2] = dataclasses.replace(params[2], n=3, seed=5, temperature=1, repetition_penalty=1.3)
    params[3] = dataclasses.replace(params[3], logit_bias={7: 4.0}, top_k=5)
    expected = on_one_device(FEW, SHORT.bits, prompts, params)
    assert len({tuple(answer) for answer in expected[2:5]}) == 3
    return prompts, params, expected


def runtime_of(cfg, placement, **options):
    return Runtime(
        quantized(cfg, placement.bits), cfg, placement, jax.devices(), **FLOAT32, **options
    )


def test_tokens_of_uneven_stages_are_the_engines():
    """Stages of one and two layers, an unused device, micro-batches that do not divide the
    requests, prompts in pieces."""
    prompts, params, expected = few()
    with runtime_of(FEW, SHORT, prefill_tokens=2) as runtime:
        assert runtime.generate(prompts, params) == expected
        assert runtime.compiled == 2 + 2 + 1  # a step and copies of pages each, penalties


def killer(stage, calls, hang=None):
    """Kills a stage in its call number `calls`, once, or lets it wait for `hang`."""
    left = [calls]

    def count(x):
        left[0] -= 1
        if left[0] == 0 and hang:
            hang.wait()
        elif left[0] == 0:
            raise RuntimeError("a device fell off the bus")
        return x

    def wrap(number, local):
        if number != stage:
            return local

        def run(params, state, x, tokens, *others):
            shape = jax.ShapeDtypeStruct(tokens.positions_T.shape, tokens.positions_T.dtype)
            positions_T = jax.pure_callback(count, shape, tokens.positions_T)
            tokens = dataclasses.replace(tokens, positions_T=positions_T)
            return local(params, state, x, tokens, *others)

        return run

    return wrap


@pytest.mark.parametrize("retries", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stage_that_dies_says_where_and_its_requests_run_again(retries, caplog):
    prompts, params, expected = few()
    runtime = runtime_of(FEW, SHORT, prefill_tokens=2, wrap=killer(1, 7))
    if retries:
        answers = runtime.generate(prompts, params, retries=1)
        assert "stage 1 (device 0, layers 1 to 2) died" in caplog.text
    else:
        where = r"^stage 1 \(device 0, layers 1 to 2\) died: .*fell off the bus; "
        with pytest.raises(StageError, match=where) as error:
            runtime.generate(prompts, params)
        assert (error.value.stage, error.value.device, error.value.layers) == (1, 0, (1, 3))
        runtime.restart(jax.devices()[::-1])
        answers = runtime.generate(prompts, params)
    assert answers == expected
    runtime.close()
    for call in (lambda: runtime.generate(prompts, params), runtime.restart):
        with pytest.raises(UserError, match="the runtime was closed"):  # and does not wait for ever
            call()


def test_a_restart_that_is_refused_changes_nothing():
    """It replaced the devices before it looked at them."""
    with runtime_of(FEW, SHORT, prefill_tokens=2) as runtime:
        before, stages_before = runtime._devices, list(runtime._stages)
        for devices, words in (
            (jax.devices()[:1], "8 devices are needed, got 1"),
            ([], "8 devices are needed, got 0"),
            ([jax.devices()[:2]] * 8, "quantized matrices are not cut over tensor ranks"),
        ):
            with pytest.raises(UserError, match=words):
                runtime.restart(devices)
            assert runtime._devices is before and runtime._stages == stages_before
        runtime.restart()
        assert runtime._stages == stages_before


@pytest.mark.slow
def test_a_stage_that_hangs_is_named_and_its_requests_run_again(caplog):
    prompts, params, expected = few()
    hang = threading.Event()
    with runtime_of(FEW, SHORT, prefill_tokens=2, wrap=killer(1, 7, hang), timeout_s=20) as runtime:
        hung = runtime._stages[1]._thread
        assert runtime.generate(prompts, params, retries=1) == expected
    assert "stage 1 (device 0, layers 1 to 2) does not answer" in caplog.text
    hang.set()
    hung.join()  # a thread that comes back while Python ends would abort the process


def test_who_waits_for_a_hung_stage_is_not_blamed(monkeypatch):
    """Three stages, of which the middle one hangs: it alone is replaced, and the others go on."""
    go_on = threading.Event()

    class Fake:
        def __init__(self, cfg, place, *_):
            self.place = place

        def check(self):
            """It computes nothing, so there is nothing that could be missing."""

        def step(self, x, hang):
            if hang and self.place.stage == 1:
                go_on.wait()
            return (x or 0) + 1

    monkeypatch.setattr(stages, "Stage", Fake)
    monkeypatch.setattr(stages, "GRACE_S", 0.1)
    places = [stages.Place(k, k, k, k + 1, k == 2) for k in range(3)]
    chain = [stages.LocalStage(None, place) for place in places]

    def through(hang):
        x = None
        for stage in chain:
            x = stage.send("step", x, hang)
        return x

    assert chain[2].wait(through(hang=False), 10) == 3
    lost = through(hang=True)
    with pytest.raises(TimeoutError):
        chain[2].wait(lost, 0.2)
    with pytest.raises(StageError, match=r"^stage 1 \(device 1, layer 1\) does not answer"):
        runtime_.check(chain, places, 0.2)
    assert [stage.failed for stage in chain] == [False, True, False]
    chain[1].close()
    with pytest.raises(RuntimeError, match="was closed"):
        chain[2].wait(lost, 10)
    chain[1] = stages.LocalStage(None, places[1])
    assert chain[2].wait(through(hang=False), 10) == 3
    go_on.set()
    for stage in chain:
        stage.close()


def test_a_timeout_of_a_stages_own_program_is_its_error(monkeypatch):
    """A program that raises TimeoutError died; "does not answer" is for a wait that ended."""

    class Fake:
        def __init__(self, cfg, place, *_):
            self.place = place

        def check(self):
            """It computes nothing, so there is nothing that could be missing."""

        def step(self, x):
            if self.place.stage == 1:
                raise TimeoutError("the disk took 30 s")
            return x

    monkeypatch.setattr(stages, "Stage", Fake)
    places = [stages.Place(k, k, k, k + 1, k == 2) for k in range(3)]
    for limit in (None, 10.0):
        chain = [stages.LocalStage(None, place) for place in places]
        x = 1
        for stage in chain:
            x = stage.send("step", x)
        with pytest.raises(TimeoutError, match="the disk") as error:
            chain[2].wait(x, limit)
        assert not isinstance(error.value, stages.NoAnswerError)
        died = r"^stage 1 \(device 1, layer 1\) died: TimeoutError: the disk took 30 s;"
        with pytest.raises(StageError, match=died):
            runtime_.check(chain, places, limit)
        for stage in chain:
            stage.close()


def test_a_stage_that_does_not_start_leaves_none_running(monkeypatch):
    begun = []

    class Second(stages.LocalStage):
        def __init__(self, cfg, place, *options):
            if place.stage == 1:
                raise RuntimeError("no memory")
            super().__init__(cfg, place, *options)
            begun.append(self)

        def close(self):
            super().close()
            begun.remove(self)

    monkeypatch.setattr("megajax.systems.llm_pq.runtime.LocalStage", Second)
    with pytest.raises(RuntimeError, match="no memory"):
        runtime_of(FEW, SHORT)
    assert not begun


def test_what_cannot_be_placed_is_refused():
    def refuse(match, params=None, devices=None, **changes):
        placement = dataclasses.replace(SHORT, **changes)
        with pytest.raises(UserError, match=match):
            Runtime(params or sharp(FEW), FEW, placement, devices or jax.devices(), **FLOAT32)

    refuse("must cut the model's 3 layers without a hole", stages=((0, 0, 1), (1, 2, 3)))
    refuse("must cut the model's 3 layers", stages=((0, 0, 3), (1, 3, 3)))
    refuse("must be different ones of 0 to 1", devices=jax.devices()[:2])
    refuse("bits has 2 entries for 3 layers", bits=(16, 4))
    refuse("prefill_batch=0 must be a whole number from 1 on", prefill_batch=0)
    refuse("decode_batch=2.5 must be a whole number from 1 on", decode_batch=2.5)
    more = dataclasses.replace(FEW, layers=4)
    refuse(
        r"blocks\.\S+ has the shape \[4, .*that of the configuration's model is \[3,", sharp(more)
    )
    refuse("parameters have 4 layers, the configuration 3", quantized(more, (16, 4, 4, 4)))
    refuse("quantized matrices are not cut over tensor ranks", devices=[jax.devices()[:2]] * 3)
    params = quantized(FEW, SHORT.bits)
    refuse(r"layer 1 of the parameters has \[4\] bits, and 8 in", params, bits=(16, 8, 4))
    refuse(r"layer 0 of the parameters has \[16\] bits, and 4 in", params, bits=(4, 4, 4))


def most_running(monkeypatch):
    """Returns what tells how many answers ran at the same time at most."""
    counts, submit, step = [0, 0], Engine.submit, Engine.step  # now, at most

    def counted_submit(engine, prompt, params, **options):
        counts[0] += params.n
        counts[1] = max(counts)
        return submit(engine, prompt, params, **options)

    def counted_step(engine):
        outputs = list(step(engine))
        counts[0] -= sum(output.finish_reason is not None for output in outputs)
        return outputs

    def peak():
        return counts[1]

    monkeypatch.setattr(Engine, "submit", counted_submit)
    monkeypatch.setattr(Engine, "step", counted_step)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        Placement(((2, 0, 3), (0, 3, 4), (3, 4, 5)), (16, 4, 4, 8, 16), 2, 3),
        Placement(((1, 0, 1), (0, 1, 2), (2, 2, 5)), (3, 8, 4, 3, 3), 4, 2),
        Placement(((0, 0, 5),), (4, 4, 3, 3, 16), 3, 6),
        Placement(tuple((k, k, k + 1) for k in range(5)), (16,) * 5, 1, 1),
        Placement(((4, 0, 2), (6, 2, 5)), (16,) * 5, 8, 16),
    ],
)
@pytest.mark.parametrize("options", [{}, {"requests": 3}, {"prefill_tokens": 5, "seed": 3}])
def test_tokens_of_every_kind_of_placement(placement, options, monkeypatch):
    prompts, params = traffic(9, 16)
    runtime = Runtime(sharp(CFG), CFG, placement, jax.devices(), **FLOAT32, **options)
    seed = options.get("seed", 0)
    expected = on_one_device(CFG, placement.bits, 2 * prompts, 2 * params, seed=seed)
    peak = most_running(monkeypatch)
    for _ in range(2):  # the second call draws other tokens, in pages that the first one filled
        assert runtime.generate(prompts, params) == expected[: len(params)]
        expected = expected[len(params) :]
    assert peak() == options.get("requests", 9)
    runtime.close()


@pytest.mark.slow
def test_a_stage_of_several_devices_has_tensor_ranks():
    """Beside a stage of one device; learned positions, an untied head, a parallel block."""
    cfg = dataclasses.replace(RICH, layers=3)
    placement = dataclasses.replace(SHORT, bits=(16, 16, 16))
    prompts, params = traffic(5, 12)
    each = [jax.devices()[:4], None, jax.devices()[4]]
    with Runtime(sharp(cfg), cfg, placement, each, **FLOAT32) as runtime:
        answers = runtime.generate(prompts, params)
        words = r"prompts\[0\] of 30 tokens and max_tokens=3 are more"
        with pytest.raises(UserError, match=words):
            runtime.generate([[1] * 30], SamplingParams(max_tokens=3))
    engine = Engine(cfg, sharp(cfg), **FLOAT32, max_batch=8)
    ids = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
    expected = {id: [] for id in ids}
    for output in engine.run():
        expected[output.request_id] += output.tokens
    assert answers == list(expected.values())
