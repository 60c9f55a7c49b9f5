"""An encoder's work in a pipeline's idle slots: gradients of any table are those of one device."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.models import vlm
from megajax.parallel import sharding, tensor
from megajax.parallel.pipeline import Pipeline, PipelineConfig, layer_order
from megajax.parallel.slots import EncoderRoutes
from megajax.schedule import build
from megajax.schedule.encoder import place
from megajax.schedule.ir import Table
from megajax.schedule.route import Route, route
from tests.parallel.test_pipeline import poisoned  # noqa: F401
from tests.tolerances import GRADIENTS
from tests.vision_rows import MODEL, batch_of

M = 4  # microbatches, of two rows each
SLOTS = dataclasses.replace(MODEL, decoder=dataclasses.replace(MODEL.decoder, layers=8))


@functools.cache
def one_device():
    """Parameters, a batch of eight rows, and the gradients of its loss."""
    plain, batch = vlm.parts(SLOTS), batch_of(0, rows=2 * M)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: 0.1 * rng.standard_normal(x.shape).astype(np.float32), plain.abstract
    )
    loss = lambda p: plain.loss(p, batch).cross_entropy / 64  # noqa: E731
    return params, batch, dict(named_leaves(jax.device_get(jax.jit(jax.grad(loss))(params))))


class Program:
    """The gradients of one pipeline's program, for tables of its microbatches."""

    def __init__(self, segments=2, shares=False, trains=None, dims=(2, 2), **cfg):
        pipe, ranks = dims
        mesh = MeshSpec(pipe=pipe, tensor=ranks).build(jax.devices()[: pipe * ranks])
        self.layout = layout = sharding.layout(mesh, model=SLOTS)
        cfg = PipelineConfig(**{"idle": "skip", "microbatches": M} | cfg)
        self.decoder = cfg.table(pipe)
        self.segments = segments
        params, batch, _ = one_device()
        with jax.set_mesh(mesh):
            parts = vlm.parts(
                SLOTS, None, tensor.local_ops(layout), pieces=vlm.Pieces(segments, shares)
            )
            if trains is not None:
                trained = {n: n.startswith(trains) for n, _ in named_leaves(parts.abstract)}
                names = iter(trained.values())
                mask = jax.tree.map(lambda _: next(names), parts.abstract)
                parts = dataclasses.replace(parts, trains=mask)
            self.pipe = Pipeline(parts, layout, cfg, jnp.dtype("float32"), "full")
            order = layer_order(8, pipe, cfg.chunks)
            blocks = jax.tree.map(lambda x: x[order], params["blocks"])
            self.params = sharding.place(layout, parts.axes, params | {"blocks": blocks})
        self.natural = np.argsort(order)
        self.batch = {k: x.reshape(M, 2, *x.shape[1:]) for k, x in batch.items()}
        self.jit = jax.jit(
            lambda params, batch, route: self.pipe.gradients(
                params, batch, route, lambda s: s.cross_entropy / 64
            ),
            compiler_options={"xla_backend_optimization_level": 0},
        )

    def __call__(self, plan: Route) -> dict[str, np.ndarray]:
        with jax.set_mesh(self.layout.mesh):
            grads = jax.device_get(self.jit(self.params, self.batch, plan).grads)
        grads["blocks"] = jax.tree.map(lambda x: x[self.natural], grads["blocks"])
        return dict(named_leaves(grads))


def distances(ours, theirs):
    return {
        n: float(np.linalg.norm(x - theirs[n]) / np.linalg.norm(theirs[n])) for n, x in ours.items()
    }


def shuffled(decoder: Table, segments: int, rng: random.Random) -> Table:
    """A valid table: microbatches in another order, some ticks empty."""
    order = rng.sample(range(M), M)
    slots = (s._replace(microbatch=order[s.microbatch]) for s in decoder.slots)
    table = place(dataclasses.replace(decoder, slots=tuple(slots)), [(segments, segments)] * M)
    ticks = sorted(rng.sample(range(table.ticks + 4), table.ticks))
    slots = (s._replace(tick=ticks[s.tick]) for s in table.slots)
    table = dataclasses.replace(table, slots=tuple(slots))
    table.check()
    return table


def widest(routes: list[Route]) -> Route:
    """A route with as many ticks and places as the widest of each."""
    ticks = max(len(r.embed) for r in routes)
    sizes = {v: max(dict(r.sizes)[v] for r in routes) for v, _ in routes[0].sizes}
    loops = (routes[0].loops[0]._replace(ticks=ticks),)
    return dataclasses.replace(routes[0], sizes=tuple(sizes.items()), loops=loops)


def check_random_tables(program: Program, number: int, seed: int) -> None:
    rng, (_, _, theirs) = random.Random(seed), one_device()
    tables = [shuffled(program.decoder, program.segments, rng) for _ in range(number)]
    like = widest([route(table) for table in tables])
    for table in tables:
        far = distances(program(route(table, like=like)), theirs)
        assert max(far.values()) < GRADIENTS, max(far.items(), key=lambda x: x[1])
    assert program.jit._cache_size() == 1


def test_any_table_gives_the_gradients_of_one_device(poisoned):  # noqa: F811
    """On pipe 2 x tensor 2, rows with no image, one and three; one program runs all tables."""
    check_random_tables(Program(), 3, 0)


CASES = {
    "weights whole over tensor": dict(shares=True),
    "idle slots are masked": dict(idle="mask"),
    "one segment": dict(segments=1, dims=(4, 1)),
    "pipe 4 x tensor 2": dict(dims=(4, 2)),
    "pipe 8, fewer microbatches": dict(dims=(8, 1)),
    "interleaved": dict(schedule="interleaved", chunks=2),
    "zero bubble": dict(schedule="zero_bubble"),
    "gpipe": dict(schedule="gpipe"),
    "residuals stashed": dict(stash="residuals"),
    "scattered in every tick": dict(gradients="sharded"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_schedules_and_options(case):
    check_random_tables(Program(**CASES[case]), 20, 1)


FROZEN = {
    "the tower": ("projector.", "blocks.", "tokens", "norm", "head"),
    "the projector": ("tower.", "blocks.", "tokens", "norm", "head"),
    "tower and projector": ("blocks.", "tokens", "norm", "head"),
    "all but the projector": ("projector.",),
}


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_frozen_has_no_gradient_and_the_others_have_theirs(frozen, shares):
    program = Program(trains=FROZEN[frozen], shares=shares)
    work = (2, 2 if "tower." in FROZEN[frozen] else 0)
    ours = program(route(place(program.decoder, [work] * M)))
    theirs = {n: x for n, x in one_device()[2].items() if n.startswith(FROZEN[frozen])}
    assert ours.keys() == theirs.keys()
    assert max(distances(ours, theirs).values()) < GRADIENTS


def test_microbatches_without_images_have_no_work():
    """The route of a batch follows its images, and has the shape of the largest one."""
    routes = EncoderRoutes(build.one_f_one_b(4, 8), 2, True)
    images = np.zeros((8, 1, 4), np.int32)
    full = routes(jnp.asarray(images))
    images[[1, 5]] = -1
    some = routes(jnp.asarray(images))
    assert some is routes(jnp.asarray(images)) and some is not full
    assert (
        jax.tree.structure(full) == jax.tree.structure(some) == jax.tree.structure(routes.largest)
    )
    seen = some.cells["EF"].microbatch
    assert {*seen[seen >= 0].tolist()} == {0, 2, 3, 4, 6, 7}
    assert (routes(jnp.asarray(images * 0 - 1)).cells["EF"].chunk < 0).all()
    for work in ([True] * 8, [False] * 8, [True, False] * 4, [False] * 7 + [True]):
        assert routes.planned(work)[0].units <= routes.planned([True] * 8)[0].units
