"""A step of the engine with the paged kernel, compiled for H100s that are not there."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as PS

from megajax.core.mesh import MeshSpec
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import map_words
from megajax.serving import forward as forward_
from megajax.serving import tiles
from megajax.serving.forward import Forward
from megajax.systems.aot import QUICK
from pallas_kernels import aot
from tests import tables

pytestmark = pytest.mark.aot
CFG = DecoderConfig(
    layers=2, width=256, heads=8, kv_heads=2, head_width=64, mlp=512, vocab=512, window=200
)
POOL, PAGE, WIDTH = 64, 16, 32


def lowered(tokens, segments, tensor, exact=False, attention=None):
    mesh = MeshSpec(tensor=tensor).build(aot.devices(1)[:tensor])
    with jax.set_mesh(mesh):
        forward = Forward(CFG, mesh, dtype="bfloat16")
        layout = forward.layout
        params = map_words(
            lambda words, x: jax.ShapeDtypeStruct(
                x.shape, jnp.bfloat16, sharding=layout.named(layout.stored(*words))
            ),
            forward.parts.axes,
            forward.parts.abstract,
        )

        def like(shape, dtype, spec):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.named(spec))

        keys = like((CFG.layers * POOL, PAGE, forward.heads, 64), jnp.bfloat16, forward.page_spec)
        numbers = forward_.tokens_like(tokens, segments, WIDTH)
        numbers = jax.tree.map(lambda x: like(x.shape, jnp.int32, PS(*[None] * x.ndim)), numbers)
        specs = forward_.Pages(*[forward.page_spec] * 2)

        def step(params, pages, tokens, rows):
            if exact:
                return tiles.tile(forward, params, pages, tokens)[::2]
            return forward.run(params, pages, tokens, rows, attention)

        run = forward.everywhere(
            step, params, (specs, jax.tree.map(lambda x: PS(), numbers), PS()), (PS(), specs)
        )
        rows = like((segments,), jnp.int32, PS(None))
        return jax.jit(run).lower(params, forward_.Pages(keys, keys), numbers, rows)


@pytest.mark.parametrize(("tokens", "segments", "tensor"), [(8, 8, 2), (64, 8, 1)])
def test_a_step_runs_the_kernel_on_each_ranks_heads(tokens, segments, tensor):
    """Decoding on two GPUs, and a piece of a prompt on one."""
    step = lowered(tokens, segments, tensor, attention="hopper")
    text = aot.compile(step, QUICK).as_text()
    calls = [line for line in text.splitlines() if "mosaic_gpu" in line and "custom-call" in line]
    assert len(calls) == 2  # of the loop over layers: attention, and what adds up its parts
    # Each rank's pool is the whole pool of its own key-value heads.
    shape = rf"bf16\[{CFG.layers * POOL},{PAGE},{2 // tensor},64\]"
    assert any(re.search(shape, line) for line in calls)


def test_a_step_runs_the_kernel_by_default_where_it_was_measured_and_never_an_exact_one(
    monkeypatch,
):
    """Exact numerics need sums in one order."""
    T = tiles.TILE
    assert "mosaic_gpu" not in lowered(T, T, 1).as_text()
    tables.let_kernels_win(monkeypatch)
    assert "mosaic_gpu" in lowered(T, T, 1).as_text()
    assert "mosaic_gpu" not in lowered(T, T, 1, exact=True).as_text()
