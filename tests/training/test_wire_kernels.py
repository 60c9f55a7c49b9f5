"""A train step whose exchange runs in kernels: beside plain JAX, and what the H100 runs.

The exchange has the bits of plain JAX (tests/parallel/test_passes.py). Whole steps are two programs
in which XLA fuses the model's own products with sums otherwise, so they agree to rounding.
"""

import collections
import dataclasses
import re
import types

import jax
import numpy as np
import pytest

from megajax.training import report
from megajax.training.step import make_train_step
from pallas_kernels import interpret
from tests.tiny import MODEL, host_batch, on, run_config
from tests.training.test_wire_aot import DEEP, compiled

# A layer and the table have 8192 weights for each of four ranks: what the kernels take whole.
FITS = dataclasses.replace(
    MODEL, width=64, head_width=16, mlp=128, activation="gelu", vocab=512, layers=3
)
MESHES = {
    "streamed": dict(mesh__node=2, mesh__data=2),
    "pipeline": dict(mesh__pipe=2, mesh__node=2, mesh__data=1),
}


def stepped(kernels, changes):
    """Returns (the update of the parameters, the loss, what the start says)."""
    cfg = run_config(wire="sdp4bit", exchange__kernels=kernels, **changes)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(FITS, layers=2))
    mesh = cfg.mesh.build(jax.devices()[:4])
    train_step, said = make_train_step(cfg, mesh), []
    report.show_wire(types.SimpleNamespace(say=said.append), cfg, train_step, mesh)
    state = train_step.init(0)
    before = flat(state.params)  # the step donates its state
    state, metrics = train_step.step(state, on(train_step, host_batch(0)))
    return flat(state.params) - before, float(metrics["loss"]), said


def flat(params):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(params)])


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_step_beside_plain_jax(name):
    """Another draw of the rounding would move the update by a tenth."""
    plain, loss, said = stepped("reference", MESHES[name])
    assert not any("kernels" in line for line in said)
    with interpret.checked():
        kernel, same, said = stepped("interpret", MESHES[name])
    passes = {"streamed": 5, "pipeline": 4}[name]  # a node of one rank relays nothing
    assert said[-1] == f"wire: kernels run {2 * passes} of {2 * passes} passes"
    assert same == pytest.approx(loss, rel=1e-6)
    assert np.linalg.norm(kernel - plain) < 0.01 * np.linalg.norm(plain)


@pytest.mark.slow
@pytest.mark.aot
def test_the_program_for_h100s_calls_the_kernels():
    """Of each layer and of the table, in place of plain JAX: no code is packed outside of them."""
    model = dataclasses.replace(DEEP, layers=3)
    text, _, _ = compiled(
        model, train__seq_len=256, train__global_batch=32, exchange__kernels="hopper"
    )
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    names = collections.Counter(re.search(r"/(\w+)/mpmd_map", line).group(1) for line in calls)
    assert names.keys() == {
        "hadamard_quantize",
        "reduce_requantize",
        "reduce_hadamard",
        "subtract_quantize",
        "dequantize_add",
    }
    assert min(names.values()) >= 2  # the layers' and the table's
    assert not re.search(r"round-nearest-even|round_nearest_even", text)
