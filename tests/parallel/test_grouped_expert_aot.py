"""What an H100's compiler makes of tokens at their experts over four ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.cost import hlo
from megajax.parallel.expert_matmul import (
    Routing,
    dispatch_grouped_matmul,
    grouped_matmul_combine,
)
from megajax.systems.aot import QUICK
from pallas_kernels import aot
from tests import tables


def compiled_layer(implementation, R, T, D, F, E, A):
    """The program of both halves and all gradients for R H100s; (text, mesh sizes)."""
    mesh = Mesh(np.array(aot.devices(1, 8)[:R]), "expert")
    ranks, how = P("expert"), {"implementation": implementation}

    def local(x, up, down, weight, index):
        routing = Routing(index, weight)
        h, dispatch = dispatch_grouped_matmul(x, up, routing, expert_axis="expert", **how)
        return grouped_matmul_combine(jax.nn.gelu(h), down, dispatch, weights=weight, **how)

    def step(*args):
        *args, index = args
        cut = jax.shard_map(local, mesh=mesh, in_specs=ranks, out_specs=ranks)
        y, pull = jax.vjp(lambda *a: cut(*a, index), *args)
        return pull(y)

    shapes = (R * T, D), (R * E, D, F), (R * E, F, D), (R * T, A), (R * T, A)
    dtypes = *[jnp.bfloat16] * 3, jnp.float32, jnp.int32
    like = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, ranks))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return aot.compile(jax.jit(step).lower(*like), QUICK).as_text(), dict(mesh.shape)


@pytest.mark.aot
@pytest.mark.slow
def test_every_hop_of_a_ring_has_one_sources_product_beside_it(monkeypatch):
    """Four H100s, both halves and all gradients: x and sums forward, dy back; x again and dx."""
    R, T, D, F, E, A = 4, 256, 256, 512, 2, 2
    tables.let_kernels_win(monkeypatch)  # a kernel's FLOPs can be read beside a hop
    text, sizes = compiled_layer("ring", R, T, D, F, E, A)
    sent = hlo.collectives(text, sizes)
    hops = [c for c in sent if c.kind == "collective-permute"]
    assert [c.nbytes for c in hops] == [T * D * 2] * 3 + [T * D * 4] * 3 + [T * D * 2] * 3
    assert {c.flops_beside for c in hops} == {2 * T * A * D * F} and all(c.is_hidden for c in hops)
    # The choices and weights of all ranks, which are small, come first.
    assert all(c.is_hidden for c in sent if c.nbytes > R * T * A * 8), sent
    assert text.count('custom_call_target="mosaic_gpu') == 3 * R + 3  # dh w^T and both weights'


@pytest.mark.aot
@pytest.mark.slow
def test_fused_halves_have_their_communication_inside():
    """A kernel a half each way; x again, and what is a number a choice."""
    T, D, A = 256, 256, 2
    text, sizes = compiled_layer("fused", 4, T, D, 512, 2, A)
    assert text.count('custom_call_target="mosaic_gpu') == 4
    large = [c for c in hlo.collectives(text, sizes) if c.nbytes > 4 * T * A * 8]
    assert [(c.kind, c.nbytes) for c in large] == [("all-gather", 4 * T * D * 2)]
