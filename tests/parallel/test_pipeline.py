"""Pipelined training against one device, schedule by schedule; what a pipeline refuses."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.manager import CheckpointManager
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.models import decoder
from megajax.parallel import pipeline, sharding, tensor
from megajax.parallel.pipeline import Pipeline, PipelineConfig, layer_order
from megajax.schedule import build
from megajax.schedule.route import route
from megajax.training.step import make_train_step
from tests.schedule.test_lanes import COPIES
from tests.tiny import MODEL, RICH, host_batch, on, run_config
from tests.tolerances import GRADIENTS, LONG_LOSSES, PARAMETERS

DEEP = dataclasses.replace(RICH, layers=8)
LEAN = dataclasses.replace(MODEL, layers=8)  # fewer leaves, half as much to compile
STEPS = 10


def make(model, **changes):
    cfg = dataclasses.replace(run_config(optim__clip=0.0, **changes), model=model)
    cfg.check(cfg.mesh.sizes(8))
    return make_train_step(cfg, cfg.mesh.build())


def train(model, steps, **changes):
    """Returns (losses, first gradients, last parameters, evaluation), layers in natural order."""
    train_step = make(model, **changes)
    state, losses, gradients = train_step.init(0), [], None
    for i in range(steps):
        state, metrics = train_step.step(state, on(train_step, host_batch(i)))
        losses.append(float(metrics["loss"]))
        if i == 0:  # the first moment is (1 - beta1) times the first gradient
            first = train_step.storage.natural(state.opt[0].mu)
            gradients = jax.tree.map(lambda m: np.asarray(m) / 0.1, first)
    params = jax.tree.map(np.asarray, train_step.storage.natural(state.params))
    host = host_batch(99)
    like = train_step.abstract_eval_batch
    batch = {k: jax.device_put(host[k].reshape(x.shape), x.sharding) for k, x in like.items()}
    return losses, gradients, params, float(train_step.evaluate(state.params, batch).cross_entropy)


@functools.cache
def control(model):
    """One device."""
    return train(model, STEPS, mesh__data=1)


def distance(a, b):
    """The largest relative L2 distance of two leaves."""
    leaves = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (a, b))
    pairs = zip(*leaves, strict=True)
    return max(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30) for x, y in pairs)


def compare(ours, want):
    np.testing.assert_allclose(ours[0], want[0], atol=LONG_LOSSES)
    assert distance(ours[1], want[1]) < GRADIENTS
    assert distance(ours[2], want[2]) < PARAMETERS
    assert ours[3] == pytest.approx(want[3], rel=1e-5)


@pytest.fixture
def poisoned(monkeypatch):
    """NaN lies in every place of a pipeline that nothing was put into yet: none may spread."""
    start = pipeline.Tick.start

    def poison(self):
        carry = start(self)
        places = {k: getattr(carry, k) for k in ("arrived", "values", "residuals")}
        return carry._replace(**jax.tree.map(_to_nan, places))

    monkeypatch.setattr(pipeline.Tick, "start", poison)


def _to_nan(x):
    return x * np.float32(np.nan) if x.dtype == np.float32 else x


CASES = {
    "1f1b, pipe 2, data 2, tensor 2": dict(
        mesh__pipe=2, mesh__data=2, mesh__tensor=2,
    ),
    "interleaved, pipe 4, data 2": dict(
        mesh__pipe=4, mesh__data=2, pipeline__schedule="interleaved", pipeline__chunks=2,
        pipeline__microbatches=8,
    ),
    "gpipe, pipe 2, context 2, tensor 2, scattered in each tick": dict(
        mesh__pipe=2, mesh__data=1, mesh__context=2, mesh__tensor=2, train__loss_chunks=2,
        pipeline__schedule="gpipe", pipeline__gradients="sharded", pipeline__microbatches=2,
    ),
    "zero_bubble, pipe 2, expert 2, tensor 2": dict(
        mesh__pipe=2, mesh__data=1, mesh__expert=2, mesh__tensor=2,
        pipeline__schedule="zero_bubble", pipeline__stash="residuals",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "case", "idle"),
    [
        # 1F1B, with experts, is a default case of test_pipeline_moe.
        pytest.param(
            LEAN, "zero_bubble, pipe 2, expert 2, tensor 2", "mask", id="zero_bubble, lean"
        ),
        *(
            pytest.param(DEEP, case, idle, id=f"{case}, {idle}", marks=pytest.mark.slow)
            for case in CASES
            for idle in ("mask", "skip")
        ),
    ],
)
def test_a_pipeline_learns_the_same(model, case, idle, poisoned):
    # A ring's permutations would wait for stages that skip their slots; it is refused.
    changes = {"context__kind": "gather"} if idle == "skip" and "context" in case else {}
    ours = train(model, STEPS, **CASES[case], **changes, pipeline__idle=idle)
    compare(ours, control(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mesh__context=2), "context.kind=ring .*--context.kind=gather"),
        (dict(mesh__tensor=2, overlap="ring"), "overlap=ring .*--overlap=xla"),
    ],
)
def test_rings_are_refused_where_stages_skip_their_slots(changes, message):
    with pytest.raises(UserError, match=f"pipeline.idle=skip: with {message}"):
        make(LEAN, mesh__pipe=2, mesh__data=1, pipeline__idle="skip", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("stages, times", list(itertools.product((2, 4), (1, 2, 3))))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_every_schedule_learns_the_same(schedule, stages, times):
    changes = dict(
        mesh__pipe=stages,
        mesh__data=2,
        train__global_batch=48,
        pipeline__schedule=schedule,
        pipeline__chunks=2 if schedule == "interleaved" else 1,
        pipeline__microbatches=times * stages,
    )

    def run(**changes):
        train_step = make(DEEP, **changes)
        state, losses = train_step.init(0), []
        for i in range(20):
            state, metrics = train_step.step(state, on(train_step, host_batch(i, rows=48)))
            losses.append(float(metrics["loss"]))
        return losses

    want = run(mesh__data=1, train__global_batch=48)
    np.testing.assert_allclose(run(**changes), want, atol=LONG_LOSSES)


@pytest.mark.parametrize(
    "table, by_chunk",
    [
        (build.interleaved(8, 32, 6), False),
        (build.interleaved(8, 32, 6), True),
        (build.zero_bubble(8, 8), False),  # two loops of 7 ticks: 7 microbatches enter, then 1
    ],
)
def test_branches_run_once_a_microbatch(table, by_chunk):
    plan = route(table, by_chunk=by_chunk)
    taken = pipeline.branches(plan)
    for scope, event in ((pipeline.ENTER, "E"), (pipeline.HEAD, "H"), (pipeline.LEAVE, "L")):
        loops = [loop for loop in plan.loops if event in loop.events]
        assert sum(taken[scope, loop.ticks] for loop in loops) == table.microbatches


@pytest.fixture(scope="module")
def small():
    """A pipeline on two devices, its parameters, and a batch of four microbatches."""
    mesh = MeshSpec(pipe=2).build(jax.devices()[:2])
    layout = sharding.layout(mesh, model=MODEL)
    with jax.set_mesh(mesh):
        parts = decoder.parts(MODEL, None, tensor.local_ops(layout, overlap="xla"))
        pipe = Pipeline(parts, layout, PipelineConfig("1f1b", 4), jnp.dtype("float32"), "full")
        params = sharding.place(layout, parts.axes, parts.init(jax.random.key(0)))
    host = host_batch(0, rows=4)
    return pipe, params, {k: np.asarray(x).reshape(4, 1, -1) for k, x in host.items()}


def on_two(pipe, batch):
    cut = pipe.layout.named(jax.P(None, *pipe.layout.act("batch", "seq")))
    return {k: jax.device_put(x, cut) for k, x in batch.items()}


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tables_of_one_shape_share_a_program(small, trains):
    """Microbatches change their numbers, in the table and in the batch: the same bits. Arrays that
    name the first microbatch four times: its loss alone counts. There is one program."""
    pipe, params, batch = small
    table, numbers = build.one_f_one_b(2, 4), [2, 0, 3, 1]
    slots = tuple(s._replace(microbatch=numbers[s.microbatch]) for s in table.slots)
    other = dataclasses.replace(table, slots=slots)
    other.check()
    renumbered = {k: x[np.argsort(numbers)] for k, x in batch.items()}
    plan = route(table, trains)
    cells = {k: c._replace(microbatch=np.minimum(c.microbatch, 0)) for k, c in plan.cells.items()}
    events = {k: np.minimum(getattr(plan, k), 0) for k in ("embed", "head", "unembed")}
    repeated = dataclasses.replace(plan, cells=cells, **events)
    first = {k: np.repeat(x[:1], 4, 0) for k, x in batch.items()}

    def run(params, batch, route):
        if trains:
            return pipe.gradients(params, batch, route, lambda s: s.cross_entropy / 64)
        return pipe.sums(params, batch, route)

    program = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    with jax.set_mesh(pipe.layout.mesh):
        one = program(params, on_two(pipe, batch), plan)
        two = program(params, on_two(pipe, renumbered), route(other, trains))
        want = program(params, on_two(pipe, first), plan)
        ours = program(params, on_two(pipe, batch), repeated)
        assert program._cache_size() == 1
        text = program.lower(params, on_two(pipe, batch), plan).as_text()
    assert distance(one, two) == distance(ours, want) == 0.0 and distance(one, ours) > 1e-3
    ticks = table.ticks if trains else table.ticks - 1
    tables = re.findall(rf"(\S+) .*tensor<{ticks}x2xi32>", text)
    assert tables and not [line for line in tables if "constant" in line]


def test_a_kind_without_a_function_is_refused_by_name(small):
    pipe, params, batch = small
    with jax.set_mesh(pipe.layout.mesh), pytest.raises(ValueError, match="EF, EB .*are F, B, W"):
        jax.eval_shape(
            lambda p, b: pipe.gradients(p, b, route(COPIES), lambda s: s.cross_entropy),
            params,
            {k: x[:2] for k, x in on_two(pipe, batch).items()},
        )


def test_interleaved_stages_hold_their_groups_and_checkpoints_know_it(tmp_path):
    assert layer_order(8, 2, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    train_step = make(
        LEAN, mesh__pipe=2, mesh__data=4, pipeline__schedule="interleaved", pipeline__chunks=2
    )
    one = make(LEAN, mesh__data=1)
    plain, state = one.init(0), train_step.init(0)
    key = state.params["blocks"]["attention"]["key"]
    assert key.sharding.spec[0] == "pipe"
    natural = train_step.storage.natural(state)
    assert distance(natural.params, plain.params) == 0.0
    assert distance(train_step.storage.arranged(natural).params, state.params) == 0.0
    assert (np.asarray(key)[2] == np.asarray(natural.params["blocks"]["attention"]["key"])[4]).all()
    manager = CheckpointManager(tmp_path)
    manager.save(1, state, order=train_step.rows).result()
    restored = manager.restore(1, like=vars(one.abstract_state))
    assert distance(restored["params"], plain.params) == 0.0
    restored = manager.restore(1, like=vars(train_step.abstract_state), order=train_step.rows)
    assert distance(restored["params"], state.params) == 0.0


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"mesh__pipe": 2, "pipeline__chunks": 2, "pipeline__schedule": "interleaved"},
            "model.layers=2 must be divisible by mesh.pipe 2 x pipeline.chunks 2 = 4; nearest: 4",
        ),
        ({"mesh__pipe": 2, "pipeline__chunks": 2}, "schedule 1f1b has one chunk a stage"),
        (
            {"mesh__pipe": 2, "mesh__data": 4, "pipeline__microbatches": 3},
            "train.global_batch=16 must be divisible by",
        ),
        ({"mesh__pipe": 2, "train__accumulate": 2}, "--pipeline.microbatches"),
        ({"mesh__pipe": 2, "model__dropout": 0.1}, "--model.dropout"),
        ({"pipeline__microbatches": 4}, "need stages: --mesh.pipe=2"),
        ({"pipeline__microbatches": 0}, "must be at least 1"),
    ],
)
def test_what_cannot_run_is_refused(changes, words):
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        cfg = run_config(**changes)
        cfg.check(cfg.mesh.sizes(8))
