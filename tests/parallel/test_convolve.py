"""`Ops.convolve` on meshes, and which parameter each product is told to multiply."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.layers import ops as ops_
from megajax.layers import param
from megajax.layers.ops import Ops
from megajax.models import decoder, encoder
from megajax.models.encoder_config import EncoderConfig
from megajax.parallel import sharding, tensor
from tests.tiny import MODEL, RICH, host_batch


def numpy_convolution(x, w, stride):
    """SAME padding of an odd kernel on even sides, in float64."""
    rows, columns = w.shape[:2]
    pads = [((k - 1) // 2, k // 2) for k in (rows, columns)]
    if stride == 2:
        pads = [((k - 2) // 2, (k - 1) // 2) for k in (rows, columns)]
    x = np.pad(x, ((0, 0), *pads, (0, 0)))
    places = [(x.shape[1] - rows) // stride + 1, (x.shape[2] - columns) // stride + 1]
    out = np.zeros((len(x), *places, w.shape[-1]))
    for i in range(places[0]):
        for j in range(places[1]):
            at = x[:, i * stride : i * stride + rows, j * stride : j * stride + columns]
            out[:, i, j] = np.tensordot(at, w, 3)
    return out


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("where", ["one device", "mesh", "inside"])
def test_a_convolution_and_its_gradients(where, stride):
    random = np.random.default_rng(0)
    x = random.standard_normal((8, 6, 8, 4))
    mesh = MeshSpec(**({"data": 1} if where == "one device" else {"data": 4, "tensor": 2})).build()
    layout = sharding.layout(mesh)
    with jax.set_mesh(mesh):
        w = param.normal(nnx.Rngs(0), layout, (3, 3, 4, 8), (None, None, "embed", "mlp"), 0.3)
        stored, rows = w[...], jax.device_put(jnp.float32(x), layout.named(layout.act("batch")))

        def loss(stored, x, convolve):
            y = convolve(x, nnx.Param(stored, axes=w.get_metadata("axes")), (stride, stride))
            return (y**2).sum() / 2, y

        if where == "inside":
            specs = layout.stored(*w.get_metadata("axes")), layout.act("batch")

            def inside(stored, x):
                gathered = jax.lax.all_gather(stored, "data", axis=2, tiled=True)  # as a chunk is
                convolve = tensor.local_ops(layout).convolve
                (_, y), (dw, dx) = jax.value_and_grad(
                    lambda w, x: (loss(w, x, convolve)[0] / 2, loss(w, x, convolve)[1]),
                    (0, 1),
                    has_aux=True,
                )(gathered, x)
                dw = jax.lax.psum_scatter(dw, "data", scatter_dimension=2, tiled=True)
                return y, dw, jax.lax.psum(dx, "tensor")

            y, dw, dx = jax.jit(
                jax.shard_map(
                    inside,
                    mesh=mesh,
                    in_specs=specs,
                    out_specs=(layout.act("batch"), *specs),
                    check_vma=False,
                )
            )(stored, rows)
        else:
            convolve = ops_.convolve if where == "one device" else tensor.ops(layout).convolve
            (_, y), (dw, dx) = jax.jit(
                jax.value_and_grad(functools.partial(loss, convolve=convolve), (0, 1), has_aux=True)
            )(stored, rows)
    want, host = numpy_convolution(x, np.float64(stored), stride), np.float64(stored)
    np.testing.assert_allclose(y, want, atol=2e-5)
    assert dw.sharding.spec == stored.sharding.spec or where == "one device"
    # The gradients by the definition of the derivative along a random direction, in float64.
    move = random.standard_normal(host.shape)
    changed = numpy_convolution(x, move, stride)
    assert (np.float64(dw) * move).sum() == pytest.approx((want * changed).sum(), rel=1e-4)
    shift = random.standard_normal(x.shape)
    changed = numpy_convolution(shift, host, stride)
    assert (np.float64(dx) * shift).sum() == pytest.approx((want * changed).sum(), rel=1e-4)


@pytest.mark.parametrize("name", ["decoder", "rich", "encoder"])
def test_each_product_is_told_which_parameter_it_multiplies(name):
    """The names are those of all matrices but tables, and each is a parameter's."""
    told = []

    def matmul(x, w, *args, name=None, **more):
        told.append(name)
        return ops_.matmul(x, w, *args, **more)

    ops = dataclasses.replace(Ops(), matmul=matmul)
    if name == "encoder":
        cfg = EncoderConfig(layers=2, width=32, heads=4, mlp=64, vocab=64, head="mlm")
        parts = encoder.parts(cfg, ops=ops)
    else:
        parts = decoder.parts({"decoder": MODEL, "rich": RICH}[name], ops=ops)
    batch = {k: jnp.asarray(v[:2]) for k, v in host_batch(0).items()}
    jax.eval_shape(lambda p: parts.loss(p, batch), parts.abstract)
    names = {n for n, _ in named_leaves(parts.abstract)}
    assert {*told} <= names
    blocks = {n for n in names if n.startswith("blocks.") and ".bias" not in n and "_bias" not in n}
    matrices = {n for n in blocks if "norm" not in n}
    assert matrices <= {*told} and len({*told} - matrices) >= 1  # and the head's
