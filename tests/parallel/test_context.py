"""Context parallelism against full attention in float64 NumPy: outputs, gradients, order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from megajax.core.mesh import MeshSpec
from megajax.layers.attention import Context
from megajax.parallel import context, sharding, tensor
from megajax.parallel.context import ContextSpec
from megajax.training.step import make_train_step
from tests.tiny import run_config

B, S, H, G, K = 2, 32, 8, 4, 8


def places(lengths, order):
    """(segments_S, positions_S) of a row packed with texts of these lengths, in an order."""
    segments = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    return segments[order].astype(np.int32), positions[order].astype(np.int32)


def mask_of(segments, positions, window):
    i, j = positions[:, :, None], positions[:, None, :]
    mask = (j <= i) & (segments[:, :, None] == segments[:, None, :])
    return mask if window is None else mask & (i - j < window)


def oracle(q, k, v, dout, mask):
    """(out, dq, dk, dv) of softmax(q k^T / sqrt K) v by the textbook, in float64."""
    q, k, v, dout = (np.asarray(a, np.float64) for a in (q, k, v, dout))
    wide_k, wide_v = (np.repeat(a, H // G, axis=2) for a in (k, v))
    logits = np.einsum("bshk,bmhk->bhsm", q, wide_k) / np.sqrt(K)
    logits = np.where(mask[:, None], logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bshk,bmhk->bhsm", dout, wide_v)
    dz = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(K)

    def narrow(wide):
        return wide.reshape(B, S, G, H // G, K).sum(3)

    return (
        np.einsum("bhsm,bmhk->bshk", p, wide_v),
        np.einsum("bhsm,bmhk->bshk", dz, wide_k),
        narrow(np.einsum("bhsm,bshk->bmhk", dz, q)),
        narrow(np.einsum("bhsm,bshk->bmhk", p, dout)),
    )


@functools.cache
def compiled(spec, ways, window):
    """`on_mesh`, once for all tests of the default blocks."""
    return on_mesh(spec, ways, window)


def on_mesh(spec, ways, window, dtype="float32"):
    """(q, k, v, dout, segments, positions) -> (out, dq, dk, dv), compiled for a mesh."""
    mesh = MeshSpec(context=ways, tensor=2).build()
    lo = sharding.layout(mesh)

    def run(q, k, v, dout, segments, positions):
        query = Context(positions, segments)
        attend = functools.partial(
            tensor.attend, lo, query=query, memory=None, window=window, context=spec
        )
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(dout)

    jitted = jax.jit(run)

    def call(*arrays):
        heads = lo.named(lo.act("batch", "seq", "heads", None))
        rows = lo.named(lo.act("batch", "seq"))
        put = [jax.device_put(jnp.asarray(x, dtype), heads) for x in arrays[:4]]
        with jax.set_mesh(mesh):
            return jitted(*put, *(jax.device_put(x, rows) for x in arrays[4:]))

    return call


def arrays(seed, order, packed):
    random = np.random.default_rng(seed)
    shapes = [(B, S, n, K) for n in (H, G, G, H)]
    dense = [random.normal(size=s).astype(np.float32) for s in shapes]
    lengths = [[5, 20, 7], [32]] if packed else [[32], [32]]
    segments, positions = map(np.stack, zip(*(places(n, order) for n in lengths), strict=True))
    return dense, segments, positions


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("kind", "ways"), [("ring", 2), ("ring", 4), ("ulysses", 2), ("ulysses", 4), ("gather", 2)]
)
def test_equals_full_attention(kind, ways, window, seed):
    spec = ContextSpec(kind)
    order = spec.order_of(S, ways)
    order = np.arange(S) if order is None else order
    call = compiled(spec, ways, window)
    for packed in (False, True):
        dense, segments, positions = arrays(seed, order, packed)
        got = call(*dense, segments, positions)
        want = oracle(*dense, mask_of(segments, positions, window))
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=f"{name}, packed {packed}")


def test_a_ring_of_one_device_counts_its_keys_once(seed):
    dense, segments, positions = arrays(seed, np.arange(S), packed=False)
    spec = jax.sharding.PartitionSpec(None, "context")

    def run(q, k, v, dout):
        query = Context(jnp.asarray(positions), jnp.asarray(segments))
        out, back = jax.vjp(lambda *x: context.ring("context", *x, query, None), q, k, v)
        return out, *back(dout)

    mesh = jax.make_mesh((1,), ("context",), (jax.sharding.AxisType.Auto,))
    cut = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)
    want = oracle(*dense, mask_of(segments, positions, None))
    for name, a, b in zip(("out", "dq", "dk", "dv"), jax.jit(cut)(*dense), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("kind", "ways"), [("ring", 4), ("gather", 2)])
def test_what_is_not_finite_stays_with_those_who_see_it(kind, ways, seed):
    """The texts, heads and queries that do not see it have the same bits, on every device."""
    spec = ContextSpec(kind)
    order = spec.order_of(S, ways)
    call = compiled(spec, ways, None)
    dense, segments, positions = arrays(seed, order, packed=True)
    seen = mask_of(segments, positions, None)[0]
    clean = call(*dense, segments, positions)
    for which, name in enumerate(("q", "k", "v", "dout")):
        dirty = [x.copy() for x in dense]
        at = int(np.flatnonzero((segments[0] == 1) & (positions[0] == 9))[0])
        dirty[which][0, at, 1, 3] = np.inf
        got = call(*dirty, segments, positions)
        rows = np.zeros((S, H), bool)
        heads = slice(2, 4) if name in "kv" else slice(1, 2)
        rows[:, heads] = (seen[:, at] if name in "kv" else np.arange(S) == at)[:, None]
        keys = (seen.T @ rows.reshape(S, G, 2).any(2)) > 0
        not_finite = (rows & (name != "dout"), rows, keys, keys)
        for part, x, y, bad in zip(("out", "dq", "dk", "dv"), got, clean, not_finite, strict=True):
            x, y = np.asarray(x), np.asarray(y)
            assert np.isnan(x[0][bad]).all(), (name, part)
            np.testing.assert_array_equal(x[0][~bad], y[0][~bad], err_msg=f"{name}, {part}")
            np.testing.assert_array_equal(x[1], y[1], err_msg=f"{name}, {part}")


def test_many_small_blocks_in_any_order(monkeypatch, seed):
    """Blocks that see nothing are skipped; which ones depends on the order, the result does not."""
    monkeypatch.setattr(context, "BLOCK", 2)
    order = np.random.default_rng(seed).permutation(S)
    dense, segments, positions = arrays(seed, order, packed=True)
    got = on_mesh(ContextSpec("ring"), 2, 6)(*dense, segments, positions)
    want = oracle(*dense, mask_of(segments, positions, 6))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_bfloat16_errs_no_more_than_the_plain_path(seed):
    order = ContextSpec().order_of(S, 2)
    dense, segments, positions = arrays(seed, order, packed=True)
    dense = [np.asarray(jnp.asarray(x, "bfloat16"), np.float32) for x in dense]
    want = oracle(*dense, mask_of(segments, positions, None))
    ring, plain = (
        on_mesh(ContextSpec(kind), 2, None, "bfloat16")(*dense, segments, positions)
        for kind in ("ring", "gather")
    )
    for ours, theirs, exact in zip(ring, plain, want, strict=True):
        assert ours.dtype == "bfloat16"
        err, bound = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (ours, theirs))
        assert err <= 2 * bound


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_zigzag_gives_every_rank_the_same_work(ways):
    """Pairs (query, key) that one long causal row makes visible, by the rank of the query."""
    mask = np.tril(np.ones((64, 64), int))
    order = ContextSpec().order_of(64, ways)
    assert sorted(order) == list(range(64))
    assert len({int(rows.sum()) for rows in np.split(mask[order], ways)}) == 1
    # Every hop too: the ranks wait for each other at its end. All but a rank's own keys, in blocks.
    pieces = mask[order][:, order].reshape(2 * ways, 64 // ways // 2, 2 * ways, -1).any((1, 3))
    ranks = pieces.reshape(ways, 2, ways, 2).sum((1, 3))
    assert set(ranks[~np.eye(ways, dtype=bool)]) == {2} and set(np.diag(ranks)) == {3}
    assert len({int(rows.sum()) for rows in np.split(mask, ways)}) == ways  # plain order has not


def test_only_a_causal_order_that_is_cut_needs_the_zigzag():
    assert ContextSpec().order_of(64, 1) is None
    assert ContextSpec("ulysses").order_of(64, 2) is None
    assert ContextSpec(order="plain").order_of(64, 2) is None
    assert ContextSpec("gather").order_of(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def equations(jaxpr, path=()):
    """Every equation of a program with the names of those that hold it."""
    for eqn in jaxpr.eqns:
        yield eqn, path
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, (*path, eqn.primitive.name))


def test_backward_pass_keeps_the_ring_and_does_not_run_it_again():
    cfg = run_config(mesh__context=4, mesh__tensor=2, train__seq_len=32)
    train_step = make_train_step(cfg, cfg.mesh.build())

    def loss(params, batch):
        return train_step.parts.loss(params, batch, None, "outputs").cross_entropy

    with jax.set_mesh(train_step.layout.mesh):
        grad = jax.jit(jax.grad(loss))
        program = grad.trace(train_step.abstract_state.params, train_step.abstract_batch).jaxpr
    operations = list(equations(program.jaxpr))
    # Four arrays (k, v, segments, positions) in the forward loop; in the backward pass four before
    # its loop, six in it (dk and dv too), two after it, two that come home.
    assert sum(e.primitive.name == "ppermute" for e, _ in operations) == 4 + 4 + 6 + 2 + 2
    layers = [e for e, path in operations if e.primitive.name == "scan" and "scan" not in path]
    # Nothing of attention is made for all layers at once, before the loop over them.
    assert all("scan" in path for e, path in operations if e.primitive.name in ("ppermute", "cond"))
    # Kept of each layer: its input, what attention gave, out (one copy) and the log-sum-exp.
    forward = next(e for e in layers if e.params["length"] == cfg.model.layers)
    stored = sum(v.aval.size for v in forward.outvars if v.aval.shape[0] == cfg.model.layers)
    width, heads = cfg.model.width, cfg.model.heads
    tokens = cfg.train.global_batch * cfg.train.seq_len
    assert stored == cfg.model.layers * tokens * (3 * width + heads)
    assert width == heads * cfg.model.head_width


def temporary_bytes(kind):
    mesh = MeshSpec(context=4, tensor=2).build()
    lo = sharding.layout(mesh)
    heads = lo.named(lo.act("batch", "seq", "heads", None))
    x = jax.ShapeDtypeStruct((1, 4096, 2, 8), "float32", sharding=heads)
    places = jax.ShapeDtypeStruct((1, 4096), "int32", sharding=lo.named(lo.act("batch", "seq")))

    def loss(q, k, v, positions, segments):
        query = Context(positions, segments)
        return tensor.attend(lo, q, k, v, query, context=ContextSpec(kind)).sum()

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, places, places)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_ring_needs_less_memory_than_gathered_keys(monkeypatch):
    monkeypatch.setattr(context, "BLOCK", 128)
    assert temporary_bytes("ring") < 0.1 * temporary_bytes("gather")
