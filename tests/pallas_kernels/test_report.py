"""The deviceless gate: nothing spills, no wgmma is serialised, and the report is of this source."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import aot
from pallas_kernels.attention import configs

PATH = Path(__file__).parents[2] / "experiments" / "results" / "kernel_report.json"
SHARED_BYTES = 227 * 1024  # of a thread block on Hopper (CUDA C programming guide, table 24)
HEAVY = ("backward d256", "backward d128")


def test_the_committed_report_is_of_this_source_and_clean():
    found = json.loads(PATH.read_text())
    assert found["source"] == configs.source_hash(), "run scripts/kernel_report.py"
    assert {row["config"] for row in found["rows"]} == set(configs.CONFIGS)
    for row in found["rows"]:
        assert row["spilled_bytes"] == 0 and not row["serialized"], row
        assert row["registers"] <= 168 and row["shared_bytes"] <= SHARED_BYTES, row


@pytest.mark.aot
@pytest.mark.parametrize(
    "config",
    ["forward d128", *(pytest.param(c, marks=pytest.mark.slow) for c in HEAVY)],
)
def test_a_sample_compiles_as_reported(config):
    rows = [row for row in json.loads(PATH.read_text())["rows"] if row["config"] == config]
    assert configs.report(config) == rows


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("cut", ["heads", "rows"])
def test_the_default_is_the_kernel_on_an_h100_and_needs_no_collective(cut):
    """Gradient of the public functions in a shard_map over two GPUs, over heads or batch rows."""
    mesh = Mesh(np.array(aot.devices(1, 2)), "x")
    spec, other = (P(None, None, "x"), P()) if cut == "heads" else (P("x"), P("x"))

    def array(*shape, dtype=jnp.bfloat16, spec=spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def grads(q, k, v, ids):
        def loss(q, k, v):
            out = pallas_kernels.packed_attention(q, k, v, segment_ids=ids, causal=True)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    q, k = array(2, 256, 4, 64), array(2, 256, 2, 64)
    ids = array(2, 256, dtype=jnp.int32, spec=other)
    step = jax.shard_map(grads, mesh=mesh, in_specs=(spec,) * 3 + (other,), out_specs=spec)
    text = aot.compile(jax.jit(step).lower(q, k, k, ids)).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3
    assert not any(word in text for word in ("all-reduce", "all-gather", "collective-permute"))
