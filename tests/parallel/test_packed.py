"""Weights that are no arrays, on meshes: a tile-sparse model against the masked dense one.

The oracle is the dense model with exact zeros on one device, by other products and no collective.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.layers import ops
from megajax.layers.weight import PackedWeight
from megajax.models import decoder
from megajax.parallel import inside, local, sharding, tensor
from megajax.parallel.collective_matmul import GATHER, SCATTER
from megajax.parallel.pipeline import Pipeline, PipelineConfig
from megajax.systems.prune_export import to_tiles
from megajax.systems.pruning import prune
from megajax.training.masking import chosen, keep, pick
from pallas_kernels.tile_sparse.api import values_of, with_values
from tests.tiny import MODEL, MQA, host_batch

TILE = {"tile": 16, "chunk": 4}


@functools.cache
def masked(cfg):
    """(dense parameters with zeros, masks, batch, logits, gradients of what stays)."""
    parts = decoder.parts(cfg)
    params = parts.init(jax.random.key(0))
    names = chosen(parts.axes)
    part, random = pick(params, names), np.random.default_rng(0)
    scores = jax.tree.map(lambda w: random.gamma(0.3, size=w.shape), part)
    masks = prune(part, scores, 0.6, axes=pick(parts.axes, names), **TILE)
    params = keep(masks, params)
    batch = {k: jnp.asarray(v) for k, v in host_batch(0, rows=4).items()}
    logits, grads = jax.jit(lambda p: both(parts, p, batch))(params)
    return params, masks, batch, logits, keep(masks, grads)


def both(parts, params, batch):
    """(logits, gradients by the values of all leaves)."""

    def loss(values):
        return parts.loss(with_values(params, values), batch).cross_entropy / 32

    return parts.logits(params, batch), jax.grad(loss)(values_of(params))


def near(found, wanted):
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted)) > 1e-2
    wanted = jax.tree.map(np.asarray, wanted)
    chex.assert_trees_all_close(jax.tree.map(np.asarray, found), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("overlap, cfg", [("xla", MODEL), ("ring", MODEL), ("xla", MQA)])
def test_tensor_ranks_hold_tiles_of_their_slices(overlap, cfg):
    params, masks, batch, logits, grads = masked(cfg)
    mesh = MeshSpec(data=2, tensor=2).build()
    lo = sharding.layout(mesh, model=cfg)
    with jax.set_mesh(mesh):
        parts = decoder.parts(cfg, lo, tensor.ops(lo, overlap=overlap))
        pack = functools.partial(to_tiles, masks=masks, axes=parts.axes, layout=lo, **TILE)
        tiles = sharding.place(lo, parts.axes, pack(params))
        place = lambda x: jax.device_put(x, lo.named(lo.act("batch", "seq")))  # noqa: E731
        found = jax.jit(lambda p, b: both(parts, p, b))(tiles, jax.tree.map(place, batch))
    up = tiles["blocks"]["mlp"]["up"]
    assert up.shape == (cfg.width, cfg.mlp // 2)
    assert up.weight.values.sharding.spec == jax.P(None, "tensor")
    near(found, (logits, values_of(pack(grads))))


@pytest.mark.parametrize(
    "gradients, overlap",
    [("local", "xla"), pytest.param("sharded", "ring", marks=pytest.mark.slow)],
)
def test_stages_hold_tiles_of_their_layers(gradients, overlap):
    params, masks, batch, _, grads = masked(MODEL)
    mesh = MeshSpec(pipe=2, data=2, tensor=2).build()
    lo = sharding.layout(mesh, model=MODEL)
    with jax.set_mesh(mesh):
        parts = decoder.parts(MODEL, None, local.ops(lo, overlap=overlap))
        pipe = Pipeline(
            parts, lo, PipelineConfig(microbatches=2, gradients=gradients),
            jnp.dtype("float32"), "full",
        )  # fmt: skip
        pack = functools.partial(to_tiles, masks=masks, axes=parts.axes, layout=lo, **TILE)
        tiles = sharding.place(lo, parts.axes, pack(params))
        cut = lo.named(jax.P(None, *lo.act("batch", "seq")))
        pieces = {k: jax.device_put(x.reshape(2, 2, -1), cut) for k, x in batch.items()}

        def mean(sums):
            return sums.cross_entropy / 32

        sums, found = jax.jit(lambda p, b: pipe.gradients(p, b, mean))(tiles, pieces)
    assert tiles["blocks"]["mlp"]["up"].weight.values.sharding.spec[0] == "pipe"
    near(values_of(found), values_of(pack(grads)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bytes(PackedWeight):
    """What a quantized weight would be: int8 and a scale for each piece."""

    codes: jax.Array
    scale: jax.Array

    @classmethod
    def of(cls, slices):
        """From a list of equal dense slices."""
        slices = np.stack(slices)
        scale = np.abs(slices).max(tuple(range(1, slices.ndim))) / 127
        codes = np.round(slices / scale.reshape(-1, *[1] * (slices.ndim - 1))).astype(np.int8)
        return cls(slices.shape[1:], jnp.asarray(codes), jnp.asarray(scale, jnp.float32))

    def astype(self, dtype):
        return dataclasses.replace(self, scale=self.scale.astype(dtype))

    def matmul(self, x, contract=1, *, bias=None, activation=None):
        return ops.matmul(x, self.codes.astype(x.dtype) * self.scale, contract)


@pytest.mark.parametrize("overlap", ["xla", "ring"])
def test_a_new_type_of_weight_needs_two_methods(overlap):
    """An MLP's two products beside a dense weight, on two tensor ranks, against float64."""
    random = np.random.default_rng(0)
    x, gate, up = (random.normal(size=n) for n in ((2, 8, 16), (16, 24), (16, 24)))
    down = random.normal(size=(24, 16))
    cut = [Bytes.of(np.split(w, 2, dim)) for w, dim in ((up, 1), (down, 0))]
    lo = sharding.layout(MeshSpec(data=1, tensor=2).build())
    axes = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
    params = {"gate": jnp.asarray(gate, jnp.float32), "up": cut[0], "down": cut[1]}

    def run(params, x):
        gate, up, down = (nnx.Param(params[k], axes=axes[k]) for k in ("gate", "up", "down"))
        on = tensor.ops(lo, overlap=overlap)
        a, b = on.up(x, (gate, up), on.matmul)
        return on.down(((a * b, down),), x, on.matmul)

    with jax.set_mesh(lo.mesh):
        stream = lo.named(lo.act("batch", "seq", None, residual=True))
        params = sharding.place(lo, axes, params)
        found = jax.jit(run)(params, jax.device_put(jnp.asarray(x, jnp.float32), stream))
    whole = [np.asarray(w.codes, float) * np.asarray(w.scale, float)[:, None, None] for w in cut]
    up, down = np.concatenate(whole[0], 1), np.concatenate(whole[1], 0)
    np.testing.assert_allclose(
        np.asarray(found), x + (x @ gate * (x @ up)) @ down, rtol=1e-4, atol=1e-4
    )


def test_pieces_for_another_mesh_are_refused():
    weight = Bytes.of(np.split(np.ones((4, 6)), 2, 1))
    with pytest.raises(UserError, match="packed in 2 pieces, and one rank has all of them"):
        ops.whole(nnx.Param(weight, axes=("embed", "mlp")), "float32")


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_a_fused_kernel_takes_arrays_only(op):
    lo, weight = sharding.layout(MeshSpec(tensor=2).build()), Bytes.of(np.ones((1, 32, 32)))
    choose = functools.partial(inside.choose_overlap, lo, op=op, dtype="float32", weights=[weight])
    assert choose("auto", shape=(64, 32, (32,))) == "xla"
    assert choose("ring", shape=(64, 32, (32,))) == "ring"
    with pytest.raises(NotImplementedError, match=f"{op} multiplies arrays.*--overlap=ring"):
        choose("fused", shape=(64, 32, (32,)))
