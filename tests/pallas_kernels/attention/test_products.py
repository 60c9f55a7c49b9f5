"""No product of the attention kernels is used before it is over, in the programs that GPUs get."""

import dataclasses
import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import hopper_backward, hopper_forward
from tests import kernel_products
from tests.attention_oracle import Case
from tests.pallas_kernels.attention.test_hopper import problem

# More tiles than buffers, of which each warpgroup lets some go before and after its own.
CASE = Case((64, 190), width=64, heads=(2, 1), spare=2)
KERNELS = {
    "forward": (hopper_forward.Tile(64, 2), 64),
    "forward, one after the other": (hopper_forward.Tile(64, 2, overlap=False), 64),
    "dq, dkv": (hopper_backward.Tile(64, 2, 64, 2), 64),
    "fused": (hopper_backward.Tile(64, 2, 64, 2, fused=True), 64),
    "dq, dkv of half the columns": (hopper_backward.Tile(32, 2, 64, 2), 256),
}


def check(name):
    tile, width = KERNELS[name]
    inputs, dout, spec, _ = problem(dataclasses.replace(CASE, width=width), 0)
    if isinstance(tile, hopper_forward.Tile):
        run = functools.partial(hopper_forward.forward, spec=spec, tile=tile)
        return kernel_products.check(run, *inputs)
    sums = jnp.zeros((2, 256))
    run = functools.partial(hopper_backward.backward, spec=spec, tile=tile)
    return kernel_products.check(run, *inputs, sums, sums, dout)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if "half" in n else n for n in KERNELS]
)
def test_every_product_is_waited_for(name):
    assert all(count > 0 for count in check(name).values())


@pytest.mark.parametrize(
    ("name", "wait", "said"),
    [
        ("forward", "wgmma_accumulator_load", "an accumulator is read"),
        ("dq, dkv", "wgmma_accumulator_load", "an accumulator is read"),
        ("dq, dkv", "wgmma_wait", "a buffer is released"),
        ("fused", "wgmma_wait", "a buffer is released"),
    ],
)
def test_a_wait_for_one_product_less_is_seen(name, wait, said, monkeypatch):
    real = getattr(plgpu, wait)

    def less(of, wait_n=0):
        return real(of + 1) if wait == "wgmma_wait" else real(of, wait_n=wait_n + 1)

    monkeypatch.setattr(plgpu, wait, less)
    with pytest.raises(kernel_products.Early, match=said):
        check(name)
