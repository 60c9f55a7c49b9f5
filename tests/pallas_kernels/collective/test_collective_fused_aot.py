"""The public functions, compiled for eight H100s that are not there: kernels, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot
from pallas_kernels.collective import api

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
FUSED = {"axis": "x", "implementation": "fused"}


def gather(x, w, v, bias):
    return api.all_gather_matmul(x, [w, v], bias=[bias, None], return_gathered=True, **FUSED)


def scatter(x, w, bias, residual):
    return api.matmul_reduce_scatter(x, w, bias=bias, residual=residual, **FUSED)


def scatter_two(x, w):
    return api.matmul_reduce_scatter([x, x], [w, w], transpose_w=True, **FUSED)


def reduce(x, w, bias):
    return api.matmul_all_reduce(x, w, bias=bias, **FUSED)


rows, columns = P(None, "x"), P(None, None, "x")
CASES = {
    # Leading dimensions; rows of a rank that are no multiple of 8.
    "gather": (
        gather,
        [(2, 100, 512), (512, 256), (512, 192), (256,)],
        (rows, P(None, "x"), P(None, "x"), P("x")),
        ((columns, columns), columns),
    ),
    "scatter": (
        scatter,
        [(2, 96, 512), (512, 384), (384,), (2, 12, 384)],
        (columns, P("x"), P(), rows),
        rows,
    ),
    "scatter two": (scatter_two, [(96, 512), (384, 512)], (rows, rows), P("x")),
    "reduce": (reduce, [(1, 3, 512), (512, 384), (384,)], (columns, P("x"), P()), P()),
}


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("checked", [True, False])
def test_one_kernel_and_no_collective(name, shape, checked):
    """On a whole node, and on an axis of a mesh; all eight devices are its replicas."""
    function, shapes, in_specs, out_specs = CASES[name]
    names = ("x",) if len(shape) == 1 else ("d", "x")
    mesh = Mesh(np.array(aot.devices(1, 8)).reshape(shape), names)

    def array(size, spec):
        """size: a rank's; what the spec cuts is as long again for every rank."""
        cut = (*spec, None, None)
        global_shape = [n * (shape[-1] if cut[i] == "x" else 1) for i, n in enumerate(size)]
        return jax.ShapeDtypeStruct(global_shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    args = [array(size, spec) for size, spec in zip(shapes, in_specs, strict=True)]
    step = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked
    )
    text = aot.compile(jax.jit(step).lower(*args)).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 1
    assert "num_partitions=8" in text
    assert not any(word in text for word in COLLECTIVES)
