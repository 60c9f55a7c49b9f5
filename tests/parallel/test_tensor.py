"""The sharded Ops one by one, where a whole training run would not show a mistake."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from megajax.core.mesh import MeshSpec
from megajax.layers import attention as attention_
from megajax.layers.ops import Ops
from megajax.parallel import context, sharding, tensor
from megajax.parallel.context import ContextSpec
from megajax.training.step import make_train_step
from tests import tables
from tests.tiny import host_batch, on, run_config, step_of
from tests.tolerances import LOSSES, NORMS

MESHES = [{"mesh__data": 1}, {"mesh__tensor": 2, "mesh__context": 2, "mesh__node": 2}]


def one_step(train_step):
    _, metrics = train_step.step(train_step.init(0), on(train_step, host_batch(0)))
    return float(metrics["loss"]), np.asarray(metrics["leaf_norms"])


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        (MESHES[0], "ring"),
        (MESHES[1], "ulysses"),
        # The same shard_map around the same kernel; what is gathered, test_context.py compares.
        pytest.param(MESHES[1], "gather", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_without_axis_types_has_the_same_gradients(mesh, kind, monkeypatch):
    """cuDNN's path on this machine: its shard_map cannot be checked, so its gradients are."""
    want = one_step(step_of(run_config(**MESHES[0])))
    plain = attention_.attend
    seen = []

    def stand_in(q, k, v, query, memory, window, implementation, *more, **words):
        seen.append(implementation)
        return plain(q, k, v, query, memory, window, "xla", *more, **words)

    monkeypatch.setattr(attention_, "attend", stand_in)
    cfg = run_config(train__attention="cudnn", context__kind=kind, **mesh)
    got = one_step(make_train_step(cfg, cfg.mesh.build()))
    assert set(seen) == {"cudnn"}
    assert got[0] == pytest.approx(want[0], abs=LOSSES)
    np.testing.assert_allclose(got[1], want[1], rtol=NORMS)


def test_dots_keep_no_partial_sums():
    """A row-parallel product's result is `unreduced`; what the ranks' sums add up to is kept, so
    that only attention's weights, a product of two activations, are made again."""
    two, products = {"mesh__tensor": 2, "mesh__data": 1}, []
    for remat in ("none", "dots"):
        train_step = step_of(run_config(train__remat=remat, **two))
        lowered = train_step.step.lower(train_step.abstract_state, train_step.abstract_batch)
        products.append(lowered.as_text().count("stablehlo.dot_general"))
    assert products[1] == products[0] + 1
    got, want = one_step(train_step), one_step(step_of(run_config(**MESHES[0])))
    assert got[0] == pytest.approx(want[0], abs=LOSSES)
    np.testing.assert_allclose(got[1], want[1], rtol=NORMS)


def test_attention_is_chosen_with_a_reason():
    lo = sharding.layout(MeshSpec(tensor=2).build())
    choose = functools.partial(context.choose_attention, lo)
    assert choose("auto", "bfloat16") == ("xla", "auto: cuDNN needs a GPU")
    assert choose("cudnn", "bfloat16") == ("cudnn", "asked for")
    from unittest import mock

    device = mock.Mock(platform="gpu", device_kind=tables.H100)
    gpu = mock.Mock(mesh=mock.Mock(devices=np.array([device])), live=mock.Mock(return_value=()))
    assert context.choose_attention(gpu, "auto", "float32")[0] == "xla"
    assert context.choose_attention(gpu, "auto", "bfloat16")[0] == "cudnn"
    gpu.live.return_value = ("context",)
    assert context.choose_attention(gpu, "auto", "bfloat16") == (
        "xla",
        "a ring joins its blocks itself",
    )
    ulysses = ContextSpec("ulysses")
    assert context.choose_attention(gpu, "auto", "bfloat16", ulysses)[0] == "cudnn"


def test_packed_rows_take_ours_where_a_table_says_so(monkeypatch, tmp_path):
    """Nothing measured, or another was faster: cuDNN; a cache, or keys of others, too."""
    from unittest import mock

    from pallas_kernels.attention import tiling

    gpu, device = mock.Mock(live=mock.Mock(return_value=())), mock.Mock(platform="gpu")
    device.device_kind = tables.H100
    gpu.mesh.devices = np.array([device])
    choose = functools.partial(context.choose_attention, gpu, "auto")
    packed = (128, 4, 4096)
    assert choose("bfloat16", packed=packed)[0] == "cudnn"
    key = tiling.key("bfloat16", 128, 4, 4096, None)
    best = {"rivals": {"reference": 9.0, "cudnn": 1.5}}
    forward = tables.row(tiling.FORWARD, key, **best)
    backward = tables.row(tiling.BACKWARD, key | {"deterministic": True}, **best)
    for rows, expected in (
        ((forward, backward), "varlen"),
        ((forward,), "cudnn"),  # the backward pass was not measured
        ((forward | {"fastest": "reference"}, backward), "cudnn"),
        ((forward | {"rivals": {"cudnn": 0.5}}, backward), "cudnn"),
        ((forward, backward | {"correct": False}), "cudnn"),
    ):
        tables.write(monkeypatch, tmp_path, *rows)
        assert choose("bfloat16", packed=packed)[0] == expected
    tables.write(monkeypatch, tmp_path, forward, backward)
    assert choose("bfloat16", packed=(64, 4, 4096))[0] == "cudnn"  # of another head width
    tables.write(monkeypatch, tmp_path, forward, backward, kind=tables.A100)
    device.device_kind = tables.A100
    kernel, why = choose("bfloat16", packed=packed)
    assert kernel == "cudnn" and "packed rows by a mask" in why
    for refused in ((256, 4, 4096), (60, 4, 4096), (128, 4, 4095)):  # by cuDNN, with a bias
        assert choose("bfloat16", packed=refused)[0] == "xla"
    assert choose("bfloat16")[0] == "cudnn" and "mask" not in choose("bfloat16")[1]
    assert choose("float32", packed=packed)[0] == "xla"
    device.device_kind = tables.H100
    tables.write(monkeypatch, tmp_path, forward, backward)
    assert choose("bfloat16")[0] == "cudnn" and choose("float32", packed=packed)[0] == "xla"
    gpu.live.return_value = ("context",)
    assert choose("bfloat16", ContextSpec("ulysses"), packed)[0] == "varlen"
    assert choose("bfloat16", ContextSpec("gather"), packed)[0] == "cudnn"


GROUPED = {"model__kv_heads": 2, "model__window": 5, "mesh__tensor": 2}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"mesh__data": 1}, GROUPED])
def test_packed_attention_trains_as_xla_does(changes):
    """Losses of four steps on rows of several segments."""

    def losses(attention):
        train_step = step_of(run_config(train__attention=context, **changes))
        state, losses = train_step.init(0), []
        for i in range(4):
            state, metrics = train_step.step(state, on(train_step, host_batch(i)))
            losses.append(float(metrics["loss"]))
        return losses

    want = losses("xla")
    assert want[-1] < want[0]
    np.testing.assert_allclose(losses("varlen"), want, atol=LOSSES)


@pytest.mark.parametrize("decode", [False, True])
def test_lookup_on_every_layout(decode):
    """Rows of a table cut over tensor and ZeRO axes, for training and for decoding."""
    table = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    ids = np.array([[3, 0, 15, 7], [8, 8, 1, 2]], np.int32)
    mesh = MeshSpec(context=2, tensor=2).build()
    lo = sharding.layout(mesh, decode=decode)
    with jax.set_mesh(mesh):
        placed = jax.device_put(table, lo.named(lo.stored("vocab", "embed")))
        w = nnx.Param(placed, axes=("vocab", "embed"))
        out = tensor.lookup(lo, [(w, jax.numpy.asarray(ids))], "float32")
    assert out.sharding.spec == lo.act("batch", "seq", None, residual=True)
    np.testing.assert_array_equal(np.asarray(out), table[ids])


class Half:
    """A codec: bfloat16 travels. Notes how what it sees lies."""

    def __init__(self):
        self.seen = []

    def encode(self, x):
        self.seen.append(jax.typeof(x).sharding.spec)
        return {"half": x.astype("bfloat16")}

    def decode(self, coded, dtype):
        self.seen.append(jax.typeof(coded["half"]).sharding.spec)
        return coded["half"].astype(dtype)


@pytest.mark.parametrize("mesh", [{"data": 1}, {"node": 2, "data": 2, "tensor": 2}])
@pytest.mark.parametrize("zero", ["full", "hybrid"])
def test_a_codec_codes_what_is_gathered_and_no_gradient(mesh, zero):
    """Against float64: the product has rounded weights, its gradient is that of plain ones."""
    random, rounded = np.random.default_rng(0), ml_dtypes.bfloat16
    x, c = random.normal(size=(4, 8, 16)), random.normal(size=(4, 8, 24))
    w = random.normal(size=(16, 24)).astype(np.float32)
    lo, codec = sharding.layout(MeshSpec(**mesh).build(), zero), Half()
    with jax.set_mesh(lo.mesh):
        ops = tensor.ops(lo, codec=codec)

        def put(x, spec):
            return jax.device_put(np.asarray(x, np.float32), lo.named(spec))

        def loss(w, x, c):
            (y,) = ops.up(x, (nnx.Param(w, axes=("embed", "mlp")),), ops.matmul)
            return (y * c).sum(), y

        args = (
            put(w, lo.stored("embed", "mlp")),
            put(x, lo.act("batch", "seq", None, residual=True)),
            put(c, lo.act("batch", "seq", "mlp")),
        )
        dw, y = jax.jit(jax.grad(loss, has_aux=True))(*args)
    in_use = lo.whole("embed", "mlp")
    assert codec.seen[:2] == [lo.stored("embed", "mlp"), in_use]
    np.testing.assert_allclose(np.asarray(y), x @ w.astype(rounded).astype(float), atol=2e-5)
    np.testing.assert_allclose(np.asarray(dw), np.einsum("bsd,bsf->df", x, c), atol=2e-5)
    if mesh == {"data": 1}:
        alone = Ops().whole(
            nnx.Param(jax.numpy.asarray(w), axes=("embed", "mlp")), "float32", codec
        )
        np.testing.assert_array_equal(np.asarray(alone), w.astype(rounded).astype(np.float32))
