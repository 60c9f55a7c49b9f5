"""A tree's exchange against the rule for one message; bad leaves; what several devices hold."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.mesh import make_mesh
from megajax.parallel import sharding, zero
from megajax.parallel.exchange import Exchange, Wire, add_device_dim, drop_device_dim
from megajax.quant import codec

NODES = RANKS = 2
WORDS = {
    "blocks": {
        "down": ("layers", "mlp", "embed"),
        "norm": ("layers", None),
        "up": ("layers", "embed", "mlp"),
    },
    "table": ("vocab", "embed"),
}
SHAPES = {"down": (2, 6, 32), "norm": (2, 32), "up": (2, 32, 10), "table": (7, 32)}
LEAVES = jax.tree.structure({"blocks": {"down": 0, "norm": 0, "up": 0}, "table": 0})


@functools.cache
def exchange(name="loco", start_step=0):
    mesh = make_mesh(jax.devices()[: NODES * RANKS], {"node": NODES, "data": RANKS})
    wire = Wire(codec(name).weights, codec(name), False, start_step)
    full, used = sharding.layout(mesh, "optimizer"), sharding.layout(mesh, "none")
    return Exchange(WORDS, full, used, wire, jnp.float32)


def gradients(seed):
    """Of every rank: leaves (ranks, ...)."""
    random = np.random.default_rng(seed)
    shapes = [SHAPES[n] for n in ("down", "norm", "up", "table")]
    return LEAVES.unflatten([np.float32(random.normal(size=(NODES * RANKS, *s))) for s in shapes])


@functools.cache
def scatterer(*which):
    """Returns (gradients, step, errors) -> (pieces, errors), all with a dimension of ranks."""
    one = exchange(*which)
    devices = one.devices

    def local(grads, step, errors):
        grads, errors = jax.tree.map(lambda x: x[0], (grads, errors))
        return add_device_dim(one.scatter_local(grads, jax.random.key(0), step, errors))

    spec = dict(in_specs=(devices, P(), devices), out_specs=devices, check_vma=False)
    mesh, at = one.masters.mesh, NamedSharding(one.masters.mesh, devices)
    call = jax.jit(jax.shard_map(local, mesh=mesh, **spec))
    return lambda grads, step, errors: call(jax.device_put(grads, at), jnp.int32(step), errors)


def first_errors(one):
    specs = jax.tree.map(
        lambda w: one.masters.stored(*w), WORDS, is_leaf=lambda x: type(x) is tuple
    )
    params = jax.tree.map(
        lambda x, s: jax.device_put(x[0], NamedSharding(one.masters.mesh, s)), gradients(0), specs
    )
    with jax.set_mesh(one.masters.mesh):
        return jax.jit(one.errors)(params)


def buffer(grads, where):
    """Returns (ranks, receivers, elements) of a leaf (ranks, ...), the cut dimension in front."""
    parts = np.stack(np.split(grads, NODES * RANKS, axis=where + 1), 1)
    return np.moveaxis(parts, where + 2, 2).reshape(*parts.shape[:2], -1)


def test_each_message_has_errors_of_its_own():
    """Three steps of one layer's matrices and of the table, as zero.reduce_scatter has them."""
    the_exchange, pieces_of = exchange(), []
    with jax.set_mesh(the_exchange.masters.mesh):
        errors = first_errors(the_exchange)
        run = scatterer()
        for step in range(3):
            pieces, errors = run(gradients(step), step, errors)
            pieces_of.append(jax.tree.map(np.asarray, pieces))
    assert (
        len(errors) == 2 and errors[0].step.shape == (4, 2) and np.asarray(errors[1].step)[0] == 3
    )

    def one(x, state):
        return zero.reduce_scatter(x, codec("loco"), state=state)

    rule = jax.jit(jax.vmap(jax.vmap(one, axis_name="data"), axis_name="node"))
    messages = [((("down", 1), ("up", 0)), layer) for layer in (0, 1)] + [((("table", 1),), None)]
    for leaves, layer in messages:
        state = None
        for step in range(3):
            grads = gradients(step)["blocks"] | {"table": gradients(step)["table"]}
            leaf_grads = [grads[n] if layer is None else grads[n][:, layer] for n, _ in leaves]
            rows = [buffer(g, where) for g, (_, where) in zip(leaf_grads, leaves, strict=True)]
            x = np.concatenate(rows, 2).reshape(NODES, RANKS, -1)
            if state is None:
                first = zero.start(x.shape[-1], codec("loco"), NODES, RANKS)
                state = jax.tree.map(lambda a: jnp.broadcast_to(a, (NODES, RANKS, *a.shape)), first)
            expected, state = rule(jnp.asarray(x), state)
            expected, begin = np.asarray(expected).reshape(NODES * RANKS, -1), 0
            got = pieces_of[step]["blocks"] | {"table": pieces_of[step]["table"]}
            for (name, where), row in zip(leaves, rows, strict=True):
                part = got[name] if layer is None else got[name][:, layer]
                flat = np.moveaxis(part, where + 1, 1).reshape(NODES * RANKS, -1)
                np.testing.assert_array_equal(flat, expected[:, begin : begin + row.shape[-1]])
                begin += row.shape[-1]


def test_a_leaf_that_is_not_finite_on_one_rank_is_named_and_no_other():
    one, grads = exchange(), gradients(5)
    clean = jax.tree.map(np.copy, grads)
    grads["blocks"]["up"][3, 1, 4, 4] = np.inf
    clean["blocks"]["up"][3, 1] = 0  # on that rank only: the others send what they have
    with jax.set_mesh(one.masters.mesh):
        errors, run = first_errors(one), scatterer()
        pieces, after = run(grads, 0, errors)
        expected, _ = run(clean, 0, errors)
    assert np.isnan(pieces["blocks"]["up"][:, 1]).all()
    for name, x in (pieces["blocks"] | {"table": pieces["table"]}).items():
        piece = expected["blocks"][name] if name != "table" else expected["table"]
        x, piece = (x[:, :1], piece[:, :1]) if name == "up" else (x, piece)
        np.testing.assert_array_equal(x, piece)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(after))


def test_before_the_first_quantized_step_no_error_is_kept():
    one = exchange("loco", 1)
    with jax.set_mesh(one.masters.mesh):
        errors, run = first_errors(one), scatterer("loco", 1)
        pieces, same = run(gradients(1), 0, errors)
        _, after = run(gradients(1), 1, errors)
    total = np.concatenate(np.split(gradients(1)["table"].sum(0), 4, 1))
    np.testing.assert_allclose(np.concatenate(list(pieces["table"])), total, atol=1e-6)
    for a, b, c in zip(*map(jax.tree.leaves, (errors, same, after)), strict=True):
        assert a.tobytes() == b.tobytes()
        assert a.tobytes() != c.tobytes()


def test_a_codec_without_feedback_has_no_errors():
    one = exchange("zeropp")
    assert not one.keeps_errors and one.errors(None) is None and drop_device_dim(None) is None


@pytest.mark.parametrize("where", [None, "norm", "copy"])
def test_a_device_that_holds_other_bits_is_seen(where):
    mesh = make_mesh(jax.devices()[:4], {"data": 2, "tensor": 2})
    tree = {"copy": P("tensor"), "norm": P(), "own": P(("data", "tensor"))}
    held = {}
    for name, spec in tree.items():
        at, x = NamedSharding(mesh, spec), np.arange(8, dtype=np.float32)
        parts = [x[i].copy() for i in at.devices_indices_map(x.shape).values()]
        devices = list(at.devices_indices_map(x.shape))
        if name == where:
            parts[2][1] = np.nextafter(parts[2][1], 9)
        parts = [jax.device_put(p, d) for p, d in zip(parts, devices, strict=True)]
        held[name] = jax.make_array_from_single_device_arrays(x.shape, at, parts)
    with jax.set_mesh(mesh):
        same = jax.jit(functools.partial(zero.replicas_agree, mesh, tree))(held)
    assert {n for n, ok in same.items() if not bool(ok)} == ({where} - {None})


def test_the_bytes_of_a_step_are_those_of_the_collectives_in_the_program():
    one = exchange("zeropp")
    mesh, grads = one.masters.mesh, jax.tree.map(lambda x: x[0], gradients(0))
    specs = jax.tree.map(
        lambda w: one.masters.stored(*w), WORDS, is_leaf=lambda x: type(x) is tuple
    )
    key = jax.random.key(0)
    with jax.set_mesh(mesh):
        at = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), grads, specs)
        gather = jax.shard_map(
            lambda x: one.gather_local(x, None, key)[0],
            mesh=mesh,
            in_specs=(specs,),
            out_specs=P(),
            check_vma=False,
        )
        scatter = jax.shard_map(
            lambda x: one.scatter_local(x, key, 0)[0],
            mesh=mesh,
            in_specs=(P(),),
            out_specs=specs,
            check_vma=False,
        )
        sent = collectives(jax.make_jaxpr(gather)(at).jaxpr)
        sent += collectives(jax.make_jaxpr(scatter)(grads).jaxpr)
    counted = one.wire_bytes(at)
    assert counted["weights"][0] == sum(4 * n for kind, _, n in sent if kind == "all_gather")
    for level, axis in (("inside", "data"), ("between", "node")):
        moved = [n for kind, axes, n in sent if kind == "all_to_all" and axis in axes]
        assert counted[level][0] == sum(moved) > 0
    numbers = 2 * (6 * 32 + 32 * 10) + 7 * 32
    assert [n for _, n in counted.values()] == [numbers, numbers, numbers / 2]


def collectives(jaxpr, times=1):
    """Returns [(primitive, axes, bytes)] of the payloads that collectives take."""
    sent = []
    for eqn in jaxpr.eqns:
        kind, x = eqn.primitive.name, eqn.invars[0].aval if eqn.invars else None
        if kind in ("all_to_all", "all_gather", "all_gather_invariant") and x.dtype == np.uint8:
            axes = eqn.params["axis_name"]
            axes = (axes,) if isinstance(axes, str) else axes
            sent.append((kind.removesuffix("_invariant"), axes, times * x.size))
        more = times * eqn.params["length"] if kind == "scan" else times
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            sent += collectives(inner, more)
    return sent
