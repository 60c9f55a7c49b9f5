"""The public functions, compiled for eight H100s that are not there: kernels, and nothing more."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot
from pallas_kernels.expert import api

E, K, F = 2, 256, 384
FUSED = {"axis": "x", "implementation": "fused"}


def layer(x, gate, up, down, experts, weights):
    """A layer and what its gradients need of the kernels."""
    routes = api.route(experts, experts=E, axis="x")
    (one, two), rows = api.dispatch_grouped_matmul(x, [gate, up], routes, return_rows=True, **FUSED)
    y = api.grouped_matmul_combine(one * two, down, routes, weights, **FUSED)
    dh = api.dispatch_grouped_matmul(y, down, routes, transpose_w=True, **FUSED)
    dx = api.grouped_matmul_combine(
        [dh, dh], [gate, up], routes, jnp.ones_like(weights), transpose_w=True, **FUSED
    )
    return y, rows, dx


def compiled(function, shape, checked):
    names = ("x",) if len(shape) == 1 else ("d", "x")
    mesh, R = Mesh(np.array(aot.devices(1, 8)).reshape(shape), names), shape[-1]

    def array(*size, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, P("x")))

    # Tokens of a rank that are no multiple of anything.
    choices = R * 67, 3
    args = (
        array(R * 67, K),
        array(R * E, K, F),
        array(R * E, K, F),
        array(R * E, F, K),
        array(*choices, dtype=jnp.int32),
        array(*choices, dtype=jnp.float32),
    )
    step = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=checked)
    return aot.compile(jax.jit(step).lower(*args)).as_text()


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("checked", [True, False])
def test_kernels_and_the_choices_alone(shape, checked):
    """On a whole node, and on an axis of a mesh; only the choices are gathered by XLA."""
    text = compiled(layer, shape, checked)
    assert text.count('custom_call_target="mosaic_gpu') == 4
    assert "num_partitions=8" in text
    for word in ("reduce-scatter", "all-reduce", "collective-permute", "all-to-all"):
        assert word not in text
    gathers = [line for line in text.splitlines() if re.search(r"all-gather(-start)?\(", line)]
    assert gathers and all("s32[" in line and "bf16" not in line for line in gathers)


@pytest.mark.aot
def test_a_dispatch_compiles():
    def first(x, gate, up, down, experts, weights):
        routes = api.route(experts, experts=E, axis="x")
        return api.dispatch_grouped_matmul(x, gate[:, :, :64], routes, **FUSED)

    assert compiled(first, (8,), True).count('custom_call_target="mosaic_gpu') == 1
