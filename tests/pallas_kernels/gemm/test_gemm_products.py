"""No product of a GEMM is used before it is over, in the program that GPUs get."""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_kernels.gemm import hopper
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.tiles import Tile
from tests import kernel_products

TILES = {
    "shared": Tile(128, 128, 64, 2),
    "pingpong": Tile(64, 128, 64, 2, pingpong=True),
    "splits": Tile(128, 128, 64, 2, splits=2),
}


def check(name):
    x, w = jnp.zeros((256, 256), jnp.bfloat16), jnp.zeros((256, 256), jnp.bfloat16)
    spec = Spec(None, "bfloat16")
    run = functools.partial(hopper.forward, spec=spec, tile=TILES[name], blocks=2)
    return kernel_products.check(run, x, w, None, None)


@pytest.mark.parametrize("name", TILES)
def test_every_product_is_waited_for(name):
    assert all(count > 0 for count in check(name).values())


def test_a_wait_for_one_product_less_is_seen(monkeypatch):
    real = plgpu.wgmma_wait
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: real(n + 1))
    with pytest.raises(kernel_products.Early, match="a buffer is released"):
        check("shared")
