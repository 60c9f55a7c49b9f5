"""Collectives in branches: programs that work and programs whose devices would wait for ever."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.systems.qsync import check_collectives


def mesh_2x4():
    return jax.make_mesh((2, 4), ("pipe", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def array(mesh, *names):
    """The shape of an array whose dimensions these axes cut."""
    return jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P(*names)))


def check(local, *specs):
    """Checks a shard_map of 2 x 4 devices with these inputs; with none, one that both axes cut."""
    specs, both = specs or (P("pipe", "tensor"),), P("pipe", "tensor")
    mesh = mesh_2x4()
    with jax.set_mesh(mesh):
        f = jax.shard_map(local, in_specs=specs, out_specs=both, check_vma=False)
        check_collectives(f, *(array(mesh, *spec) for spec in specs))


def total(x, axis="tensor"):
    return lax.psum(x, axis)


def branches(predicate, x, axis="tensor"):
    """A collective in one branch."""
    return lax.cond(predicate, lambda x: total(x, axis), lambda x: x, x)


def on(axis):
    return lax.axis_index(axis) == 0


@jax.custom_vjp
def plain_forward(x):
    return x * 2


plain_forward.defvjp(
    lambda x: (x * 2, x), lambda x, g: (lax.cond(on("tensor"), total, lambda g: g, g),)
)


@jax.custom_jvp
def collective_forward(x):
    return branches(on("tensor"), x)


collective_forward.defjvp(lambda p, t: (p[0], t[0]))


def loop(stop, step):
    """Runs a step until the counter has reached `stop`."""
    return lambda x: lax.while_loop(
        lambda state: state[0] < stop(x), lambda state: (state[0] + 1, step(state[1])), (0, x)
    )[1]


def scanned(start, then, use):
    """Carries a number through a scan, after the body has used it."""
    return lambda x: lax.scan(
        lambda carry, _: ((then(carry[0]), use(carry[0], carry[1])), None), (start(), x), length=3
    )[0][1]


def rotated(start, x):
    """A number that differs between devices reaches the predicate only after two passes."""
    return lax.scan(
        lambda c, _: ((c[1], c[2], c[2], branches(c[0] == 0, c[3])), None),
        (start * 0, start * 0, lax.axis_index("tensor"), x),
        length=4,
    )[0][3]


def ring(x):
    return lax.ppermute(x, "tensor", [(k, (k + 1) % 4) for k in range(4)])


def mutable(x, *, divergent):
    array = jax.new_ref(jnp.zeros((), jnp.int32))
    if divergent:
        array[...] = lax.axis_index("tensor")
    return branches(array[...] == 0, x)


BAD = {
    "switch on the index": lambda x: lax.switch(
        lax.axis_index("tensor"), [total, lambda x: x, lambda x: x, total], x
    ),
    "cond on a table by the index": lambda x: branches(
        jnp.array([True, False, True, False])[lax.axis_index("tensor")], x
    ),
    "cond on its part of an array": lambda x: branches(x[0, 0] > 0, x),
    "both axes, of which one differs": lambda x: branches(on("pipe"), x, ("pipe", "tensor")),
    "gather": lambda x: lax.cond(
        on("tensor"), lambda x: lax.all_gather(x, "tensor")[0], lambda x: x, x
    ),
    "scatter": lambda x: lax.cond(
        on("tensor"),
        lambda x: lax.psum_scatter(jnp.tile(x, (4, 1)), "tensor", tiled=True),
        lambda x: x,
        x,
    ),
    "exchange": lambda x: lax.cond(
        on("tensor"),
        lambda x: lax.all_to_all(x.reshape(4, -1), "tensor", 0, 0).reshape(x.shape),
        lambda x: x,
        x,
    ),
    "largest": lambda x: lax.cond(on("tensor"), lambda x: lax.pmax(x, "tensor"), lambda x: x, x),
    "ring over the axis": lambda x: lax.cond(on("tensor"), ring, lambda x: x, x),
    "ring over another axis": lambda x: lax.cond(on("pipe"), ring, lambda x: x, x),
    "jit in a branch": lambda x: lax.cond(on("tensor"), jax.jit(total), lambda x: x, x),
    "cond in a jit": jax.jit(lambda x: branches(on("tensor"), x)),
    "uniform cond in a divergent one": lambda x: lax.cond(
        on("tensor"), lambda x: branches(total(x[0, 0], "pipe") > 0, x), lambda x: x, x
    ),
    "cond of one axis in one of the other": lambda x: lax.cond(
        on("tensor"), lambda x: branches(on("pipe"), x), lambda x: x, x
    ),
    "scan's carry": scanned(
        lambda: lax.axis_index("tensor"), lambda c: c, lambda c, x: branches(c == 0, x)
    ),
    "scan's carry, later": scanned(
        lambda: 0, lambda c: c + lax.axis_index("tensor"), lambda c, x: branches(c == 0, x)
    ),
    "scan's carry, two passes later": lambda x: rotated(0, x),
    "scan in a branch": lambda x: lax.cond(
        on("tensor"),
        lambda x: lax.scan(lambda c, _: (total(c), None), x, length=2)[0],
        lambda x: x,
        x,
    ),
    "while of divergent length": loop(lambda x: lax.axis_index("tensor"), total),
    "collective in its condition": lambda x: lax.while_loop(
        lambda s: (s[0] < lax.axis_index("tensor")) & (total(s[0]) < 9),
        lambda s: (s[0] + 1, s[1]),
        (0, x),
    )[1],
    "a length is not uniform after it": lambda x: branches(
        lax.while_loop(lambda n: n < lax.axis_index("tensor"), lambda n: n + 1, 0) > 1, x
    ),
    "a branch's result is not uniform": lambda x: branches(
        lax.cond(on("tensor"), lambda: 0, lambda: 1) == 0, x
    ),
    "derivative of a custom_vjp": jax.grad(lambda x: plain_forward(x).sum()),
    "custom_jvp": collective_forward,
    "checkpoint": lambda x: jax.grad(
        jax.checkpoint(lambda x: jnp.sin(branches(on("tensor"), jnp.sin(x))).sum())
    )(x),
    "sum over part of the axis": lambda x: branches(
        lax.psum(lax.axis_index("tensor"), "tensor", axis_index_groups=[[0, 1], [2, 3]]) > 1, x
    ),
    "sum over the other axis": lambda x: branches(total(x[0, 0], "pipe") > 0, x),
    "a scattered sum": lambda x: branches(
        lax.psum_scatter(jnp.arange(4.0), "tensor")[None].sum() > 0, x
    ),
    "a callback's answer": lambda x: branches(
        jax.experimental.io_callback(lambda: True, jax.ShapeDtypeStruct((), bool)), x
    ),
    "a mutable array": lambda x: mutable(x, divergent=True),
}
GOOD = {
    "sum outside": lambda x: total(lax.switch(lax.axis_index("tensor"), [jnp.sin] * 4, x)),
    "no collective": loop(lambda x: lax.axis_index("tensor"), jnp.sin),
    "predicate is a sum": lambda x: branches(total(x[0, 0]) > 0, x),
    "predicate is the largest": lambda x: branches(lax.pmax(x[0, 0], "tensor") > 0, x),
    "predicate is gathered": lambda x: branches(lax.all_gather(x[0, 0], "tensor").sum() > 0, x),
    "predicate of the other axis": lambda x: branches(on("pipe"), x),
    "gather and scatter, other axis": lambda x: lax.cond(
        on("pipe"),
        lambda x: lax.psum_scatter(lax.all_gather(x, "tensor", tiled=True), "tensor", tiled=True),
        lambda x: x,
        x,
    ),
    "sum over both leaves the other": lambda x: branches(total(x[0, 0] + 1, "tensor") > 0, x),
    "scan's carry summed": scanned(
        lambda: 0.0,
        lambda c: total(c + lax.axis_index("tensor").astype(float)),
        lambda c, x: branches(c == 0, x),
    ),
    "predicate per pass": lambda x: lax.scan(
        lambda x, work: (branches(work, x), None), x, jnp.array([True, False])
    )[0],
    "table of passes and stages": lambda x: lax.scan(
        lambda x, row: (ring(branches(row[lax.axis_index("pipe")], x)), None),
        x,
        jnp.array([[True, False], [False, True]]),
    )[0],
    "while of equal length": loop(lambda x: 3, total),
    "while until all are small": lambda x: lax.while_loop(
        lambda x: total(jnp.abs(x).sum()) > 1, lambda x: total(x) / 9, x
    ),
    "derivative, sum outside": jax.grad(
        lambda x: total(lax.cond(on("tensor"), jnp.sin, jnp.cos, x)).sum()
    ),
    "custom_vjp that takes no derivative": plain_forward,
    "the platform": lambda x: lax.platform_dependent(x, cpu=total, default=lambda x: x),
    "an equal element of a barrier": lambda x: branches(
        lax.optimization_barrier((jnp.array(True), x))[0], x
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_collective_that_devices_may_miss_is_refused(case):
    with pytest.raises(UserError, match=r"is in (branch \d|the body|the condition) of the"):
        check(BAD[case])


@pytest.mark.parametrize("case", GOOD)
def test_a_collective_that_all_of_its_devices_reach_is_not(case):
    check(GOOD[case])


def test_the_message_names_the_collective_its_branch_the_axes_and_the_lines():
    def local(x):
        is_first = lax.axis_index("tensor") == 0

        def summed(x):
            return lax.psum(x, ("pipe", "tensor"))

        return lax.cond(is_first, lambda x: x, summed, x)

    with pytest.raises(UserError) as raised:
        check(local)
    line, file = local.__code__.co_firstlineno, re.escape(__file__)
    assert re.match(
        rf"psum \({file}:{line + 4}\) communicates over 'pipe', 'tensor' and is in branch 0 of the "
        rf"cond \({file}:{line + 6}\), whose predicate may differ between devices of 'tensor'",
        str(raised.value),
    )


def test_copied_inputs_are_uniform_and_cut_ones_are_not():
    def local(x, other):
        return branches(other[0, 0] > 0, x)

    cut = P("pipe", "tensor")
    check(local, cut, P(None, None))
    check(local, cut, P("pipe", None))
    with pytest.raises(UserError, match="between devices of 'tensor'"):
        check(local, cut, P(None, "tensor"))


def test_a_cast_to_what_varies_is_no_collective():
    def local(x):
        return lax.cond(on("tensor"), lambda x: x, lambda x: x * 2, x)

    mesh, spec = mesh_2x4(), P("pipe", "tensor")
    with jax.set_mesh(mesh):
        f = jax.shard_map(local, in_specs=spec, out_specs=spec)
        assert "pvary" in str(jax.make_jaxpr(f)(array(mesh, *spec))).partition("cond")[2]
        check_collectives(f, array(mesh, *spec))


def test_axes_of_one_device_do_not_differ():
    mesh = jax.make_mesh((1,), ("tensor",))
    with jax.set_mesh(mesh):
        local = jax.shard_map(BAD["switch on the index"], in_specs=P(), out_specs=P())
        check_collectives(local, array(mesh))


@pytest.mark.parametrize("vma", [False, True])
def test_outside_a_shard_map_values_are_global(vma):
    """One number predicts for all devices, whatever it was computed from."""
    mesh = mesh_2x4()
    with jax.set_mesh(mesh):
        inner = jax.shard_map(total, in_specs=P(None, "tensor"), out_specs=P(), check_vma=vma)
        check_collectives(
            lambda x: lax.cond(
                jnp.sum(x) + jnp.sum(inner(x)) > 0, inner, lambda x: jnp.zeros((8, 2)), x
            ),
            array(mesh, None, "tensor"),
        )


@pytest.mark.parametrize("vma", [False, True])
def test_what_leaves_a_shard_map_as_copied_but_differs_is_still_divergent(vma):
    """check_vma=False lets a program say that a value is copied, though each device has its own;
    check_vma=True does not see what a branch makes of constants."""

    def number():
        if vma:
            return lax.cond(on("tensor"), lambda: 0, lambda: 1)
        return lax.axis_index("tensor")

    mesh = mesh_2x4()
    with jax.set_mesh(mesh):
        x = array(mesh, None, "tensor")
        index = jax.shard_map(number, in_specs=(), out_specs=P(), check_vma=vma)

        def resharded(spec):
            """Where the index is not 0; elsewhere zeros."""
            return lambda x: lax.cond(
                index() > 0,
                lambda x: jax.sharding.reshard(x, spec),
                lambda x: jnp.zeros(x.shape, out_sharding=spec),
                x,
            )

        check_collectives(resharded(P("pipe", "tensor")), x)  # each device has what it cuts
        with pytest.raises(UserError, match="reshard.*communicates over 'tensor'"):
            check_collectives(resharded(P(None, None)), x)
        with pytest.raises(UserError, match="reduce_sum.*communicates over 'tensor'"):
            check_collectives(lambda x: lax.cond(index() > 0, jnp.sum, lambda x: 0.0, x), x)


def test_a_reshard_may_be_one_operation_of_all_devices():
    """A gather has groups; a cut that moves to another dimension may be a permutation of all."""

    def there_and_back(spec):
        def reshard(x):
            return jax.sharding.reshard(jax.sharding.reshard(x, spec), P(None, "tensor"))

        local = lambda x: lax.cond(on("pipe"), reshard, lambda x: x, x)  # noqa: E731
        return jax.shard_map(local, in_specs=P("pipe"), out_specs=P("pipe"), axis_names={"pipe"})

    mesh = mesh_2x4()
    with jax.set_mesh(mesh):
        x = array(mesh, "pipe", "tensor")
        check_collectives(there_and_back(P(None, None)), x)
        with pytest.raises(UserError, match="reshard.*one operation of all devices.*'pipe'"):
            check_collectives(there_and_back(P("tensor", None)), x)


def test_a_kernel_that_signals_other_devices_is_a_collective():
    def body(x, y, flag):
        pl.semaphore_signal(flag, device_id={"tensor": 0})

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    signals = plgpu.kernel(body, out_type=x, scratch_types=[plgpu.SemaphoreType.REGULAR])
    copies = plgpu.kernel(lambda x, y: None, out_type=x)

    def local(kernel):
        return lambda x: lax.cond(on("pipe"), kernel, lambda x: x, x)

    with jax.set_mesh(mesh_2x4()):
        for kernel in (local(copies), signals):
            check_collectives(jax.shard_map(kernel, in_specs=P(), out_specs=P()), x)
        with pytest.raises(UserError, match="over 'pipe', 'tensor' and is in branch 1"):
            check_collectives(jax.shard_map(local(signals), in_specs=P(), out_specs=P()), x)
