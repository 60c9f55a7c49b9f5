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
from megajax.core.packed import PackedWeight
from megajax.core.tree import floating
from megajax.layers import ops
from megajax.models import decoder
from megajax.parallel import sharding, tensor
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


def near(actual, expected):
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 1e-2
    expected = jax.tree.map(np.asarray, expected)
    chex.assert_trees_all_close(jax.tree.map(np.asarray, actual), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
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
        outputs = jax.jit(lambda p, b: both(parts, p, b))(tiles, jax.tree.map(place, batch))
    up = tiles["blocks"]["mlp"]["up"]
    assert up.shape == (cfg.width, cfg.mlp // 2)
    assert up.weight.values.sharding.spec == jax.P(None, "tensor")
    near(outputs, (logits, values_of(pack(grads))))


@pytest.mark.slow
@pytest.mark.parametrize("gradients, overlap", [("local", "xla"), ("sharded", "ring")])
def test_stages_hold_tiles_of_their_layers(gradients, overlap):
    params, masks, batch, _, grads = masked(MODEL)
    mesh = MeshSpec(pipe=2, data=2, tensor=2).build()
    lo = sharding.layout(mesh, model=MODEL)
    with jax.set_mesh(mesh):
        parts = decoder.parts(MODEL, None, tensor.local_ops(lo, overlap=overlap))
        pipe = Pipeline(
            parts,
            lo,
            PipelineConfig(microbatches=2, gradients=gradients),
            jnp.dtype("float32"),
            "full",
        )
        pack = functools.partial(to_tiles, masks=masks, axes=parts.axes, layout=lo, **TILE)
        tiles = sharding.place(lo, parts.axes, pack(params))
        cut = lo.named(jax.P(None, *lo.act("batch", "seq")))
        pieces = {k: jax.device_put(x.reshape(2, 2, -1), cut) for k, x in batch.items()}

        def mean(sums):
            return sums.cross_entropy / 32

        gradients = jax.jit(lambda p, b, route: pipe.gradients(p, b, route, mean))
        piped = gradients(tiles, pieces, pipe.cfg.route(2)).grads
    assert tiles["blocks"]["mlp"]["up"].weight.values.sharding.spec[0] == "pipe"
    near(values_of(piped), values_of(pack(grads)))


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


AXES = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}


def as_bytes(dense):
    """(packed for two ranks, the dense arrays that it stands for)."""
    cut = {k: Bytes.of(np.split(w, 2, AXES[k].index("mlp"))) for k, w in dense.items()}
    wide = {
        k: np.concatenate(
            np.asarray(w.codes, float) * np.asarray(w.scale, float)[:, None, None],
            AXES[k].index("mlp"),
        )
        for k, w in cut.items()
    }
    return cut, wide


def as_tiles(dense, lo):
    random = np.random.default_rng(1)
    masks = {k: random.random(w.shape) < 0.5 for k, w in dense.items()}
    pack = functools.partial(
        to_tiles, masks=masks, axes={k: AXES[k] for k in dense}, layout=lo, tile=4, chunk=2
    )
    return pack, {k: np.where(masks[k], w, 0) for k, w in dense.items()}


@pytest.mark.parametrize("overlap", ["xla", "ring"])
@pytest.mark.parametrize("kind", ["tiles", "bytes"])
def test_an_mlp_of_packed_weights(kind, overlap):
    """Two products, the first beside a dense weight's, on two tensor ranks, against float64."""
    random = np.random.default_rng(0)
    x, c = random.normal(size=(2, 2, 8, 16))
    shapes = {"up": (16, 24), "down": (24, 16)}
    gate, dense = (
        random.normal(size=(16, 24)),
        {k: random.normal(size=n) for k, n in shapes.items()},
    )
    lo = sharding.layout(MeshSpec(data=1, tensor=2).build())
    if kind == "bytes":
        packed, wide = as_bytes(dense)
    else:
        pack, wide = as_tiles(dense, lo)
        packed = pack({k: np.asarray(w, np.float32) for k, w in dense.items()})

    def loss(x, params, c):
        weights = {k: nnx.Param(w, axes=AXES[k]) for k, w in params.items()}
        on = tensor.ops(lo, overlap=overlap)
        a, b = on.up(x, (weights["gate"], weights["up"]), on.matmul)
        y = on.down(((a * b, weights["down"]),), x, on.matmul)
        return (y * c).sum(), y

    def run(*args):
        grads, y = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)(*args)
        return y, floating(grads)

    with jax.set_mesh(lo.mesh):
        stream = lo.named(lo.act("batch", "seq", None, residual=True))
        params = sharding.place(lo, AXES, packed | {"gate": jnp.asarray(gate, jnp.float32)})
        rows = (jax.device_put(jnp.asarray(a, jnp.float32), stream) for a in (x, c))
        y, (dx, grads) = jax.jit(run)(next(rows), params, next(rows))
    a, b, dh = x @ gate, x @ wide["up"], c @ wide["down"].T
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-4)
    close(np.asarray(y), x + (a * b) @ wide["down"])
    close(np.asarray(dx), c + (dh * b) @ gate.T + (dh * a) @ wide["up"].T)
    close(np.asarray(grads["gate"]), np.einsum("bsd,bsf->df", x, dh * b))
    if kind == "tiles":
        expected = {"up": np.einsum("bsd,bsf->df", x, dh * a)}
        expected["down"] = np.einsum("bsf,bsd->fd", a * b, c)
        for k, w in pack({k: np.asarray(w, np.float32) for k, w in expected.items()}).items():
            close(np.asarray(grads[k].weight.values), np.asarray(w.weight.values))


def test_pieces_for_another_mesh_are_refused():
    weight = Bytes.of(np.split(np.ones((4, 6)), 2, 1))
    with pytest.raises(UserError, match="packed in 2 pieces, and one rank has all of them"):
        ops.whole(nnx.Param(weight, axes=("embed", "mlp")), "float32")


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_a_fused_kernel_takes_arrays_only(op):
    lo, weight = sharding.layout(MeshSpec(tensor=2).build()), Bytes.of(np.ones((1, 32, 32)))
    choose = functools.partial(tensor.choose_overlap, lo, op=op, dtype="float32", weights=[weight])
    assert choose("auto", shape=lambda: (64, 32, (32,))) == "xla"
    assert choose("ring", shape=lambda: (64, 32, (32,))) == "ring"
    with pytest.raises(NotImplementedError, match=f"{op} multiplies arrays.*--overlap=ring"):
        choose("fused", shape=lambda: (64, 32, (32,)))
