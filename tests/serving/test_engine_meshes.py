"""The engine on meshes, for models of every kind, and with weights as training and pruning have
them."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.layers.attention import RopeConfig
from megajax.layers.latent import LatentConfig
from megajax.models import decoder
from megajax.models.decoder_config import PRESETS
from megajax.parallel import collective_matmul, overlap, sharding
from megajax.serving import Engine, SamplingParams
from megajax.systems.prune_export import stored, to_tiles
from megajax.systems.pruning import prune
from megajax.training.masking import chosen, keep, pick
from pallas_kernels.collective import api
from tests.plain_loop import SMALL, check_greedy, one_by_one, run_all, sharp
from tests.tiny import DEEPSEEK, LATENT, MODEL, MOE, MQA, RICH, SINKS

POOL = {"pages": 40, "page_size": 4}
PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("cfg", "mesh", "zero"),
    [
        (MQA, {"data": 2, "tensor": 4}, "full"),
        pytest.param(MODEL, {"pipe": 2, "data": 2, "tensor": 2}, "full", marks=pytest.mark.slow),
        pytest.param(MODEL, {"node": 2, "data": 2, "context": 2}, "hybrid", marks=pytest.mark.slow),
        pytest.param(RICH, {"data": 4, "tensor": 2}, "optimizer", marks=pytest.mark.slow),
        pytest.param(RICH, {"data": 1}, None, marks=pytest.mark.slow),
        pytest.param(MOE, {"expert": 4, "tensor": 2}, "full", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, {"expert": 4, "tensor": 2}, None, marks=pytest.mark.slow),
        pytest.param(MOE, {"data": 2, "expert": 2, "tensor": 2}, "full", marks=pytest.mark.slow),
        pytest.param(LATENT, {"data": 2, "expert": 2, "tensor": 2}, "full", marks=pytest.mark.slow),
        pytest.param(SINKS, {"data": 2, "expert": 2, "tensor": 2}, None, marks=pytest.mark.slow),
    ],
)
def test_greedy_of_other_models_on_meshes(cfg, mesh, zero):
    # Loops of two decode steps, whose smallest program is full with eight sequences.
    options = SMALL | POOL | {"max_batch": 8, "decode_steps": 2}
    check_greedy(cfg, 8, 12, 32, mesh, **options, zero=zero)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PRESETS])
def test_greedy_of_every_preset_at_a_small_size(name):
    """The preset's structure: block, norm, positions, bias, window, tied head, experts."""
    full = PRESETS[name]()
    groups = min(full.heads // full.kv_heads, 4)
    moe = full.moe
    if moe.experts:
        moe = dataclasses.replace(
            moe,
            experts=min(moe.experts, 8),
            top_k=min(moe.top_k, 3),
            width=48,
            groups=min(moe.groups, 4),
            top_groups=min(moe.top_groups, 2),
            dense_layers=min(moe.dense_layers, 1),
            dense_width=48,
        )
    latent = full.latent
    if latent.rank:
        small = LatentConfig(rank=16, query_rank=latent.query_rank and 24, rotary=4, value=8)
        full = dataclasses.replace(full, head_width=12, latent=small)
    head_width = 12 if latent.rank else 8
    rope = full.rope if full.rope.scaling != "longrope" else RopeConfig(partial=full.rope.partial)
    cfg = dataclasses.replace(
        full, rope=rope, layers=2, width=32,
        heads=2 * groups, kv_heads=2, head_width=head_width, mlp=64,
        vocab=61, vocab_multiple=16, max_positions=64, moe=moe, window=full.window and 9,
    )  # fmt: skip
    check_greedy(cfg, 8, 24, 48, **SMALL, **POOL)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 4}, {"data": 1}])
def test_packed_tiles_give_the_same_tokens(mesh):
    axes, random = decoder.parts(MQA).axes, np.random.default_rng(0)
    names, params = chosen(axes), sharp(MQA)
    part = pick(params, names)
    scores = jax.tree.map(lambda w: random.gamma(0.3, size=w.shape), part)
    masks = prune(part, scores, 0.5, tile=8, chunk=4, axes=pick(axes, names))
    params = keep(masks, params)
    mesh = mesh_of(**mesh)
    tiles = to_tiles(params, None, axes, layout=sharding.layout(mesh, model=MQA), tile=8, chunk=4)
    assert 0.4 < stored(tiles) < 1
    engine = Engine(MQA, tiles, mesh=mesh, **SMALL, **POOL)
    assert run_all(engine, PROMPTS, 3) == [one_by_one(MQA, p, 3, 16, params) for p in PROMPTS]
    engine.load(tiles, 1)
    assert run_all(engine, PROMPTS[:1], 3) == [one_by_one(MQA, PROMPTS[0], 3, 16, params)]


@pytest.mark.parametrize("cfg", [MQA, pytest.param(MODEL, marks=pytest.mark.slow)])
def test_sums_in_the_products_kernel_give_the_same_tokens(cfg, monkeypatch):
    """Around the kernel, which is for GPUs: each product of a step that ends on tensor ranks."""
    calls = []

    def kernel(x, w, bias, residual, *, axis, acc):
        calls.append(x.shape[:-1])
        options = {"bias": bias, "residual": residual, "acc_dtype": acc}
        return api.matmul_all_reduce(x, w, axis=axis, implementation="xla", **options)

    def best(op, shape, *_):
        return ("fused", "measured") if op == api.REDUCE else ("xla", "")

    stand_in = types.SimpleNamespace(
        fused_reduce=kernel, ranks_of=api.ranks_of, check_each=api.check_each
    )
    monkeypatch.setattr(collective_matmul, "kernels", stand_in)
    monkeypatch.setattr(overlap, "best", best)
    monkeypatch.setattr(overlap, "fused_reasons", lambda *_: ())
    engine = Engine(cfg, sharp(cfg), mesh=mesh_of(data=2, tensor=4), **SMALL, **POOL)
    prompts = [*PROMPTS, [*range(9)]]
    assert run_all(engine, prompts, 3) == [one_by_one(cfg, p, 3, 16) for p in prompts]
    assert {n for shape in calls for n in shape} - {1} == {8, 16}  # tokens of the two programs


def test_an_engine_sleeps_between_two_samplings():
    """Its memory is free meanwhile, its programs stay, and what it knew of prefixes is gone."""
    engine = Engine(MQA, sharp(MQA), **SMALL, **POOL)
    first, compiled = run_all(engine, PROMPTS, 3), engine.programs.compiled
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=3))
    with pytest.raises(UserError, match="sleep: requests have not ended"):
        engine.sleep()
    list(engine.run())
    held = nbytes()
    for version in range(1, 4):
        engine.sleep()
        assert held - nbytes() >= engine.pool.pages * 2 * 2 * 4 * 8 * 4  # layers x (k, v) x page
        request = engine.submit([1], SamplingParams(max_tokens=1))
        with pytest.raises(UserError, match="the engine sleeps; load parameters first"):
            engine.step()
        engine.cancel(request)
        list(engine.run())
        engine.load(sharp(MQA), version)
        assert run_all(engine, PROMPTS, 3) == first
        assert nbytes() <= held
    assert engine.programs.compiled == compiled


def nbytes():
    return sum(x.nbytes for x in jax.live_arrays())


def mesh_of(**sizes):
    return MeshSpec(**sizes).build(jax.devices()[: int(np.prod([*sizes.values()]))])


def test_a_mesh_that_cannot_cut_the_model_is_refused():
    with pytest.raises(UserError, match="model.heads=4 must be divisible by mesh.tensor 8"):
        Engine(MODEL, {}, mesh=mesh_of(tensor=8))
    with pytest.raises(UserError, match="has the axes data and needs pipe, node"):
        Engine(MODEL, {}, mesh=jax.make_mesh((8,), ("data",)))
