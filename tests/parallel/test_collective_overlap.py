"""The choice between a ring and plain XLA, and the compiled programs that it is about."""

import collections
import dataclasses
import functools
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.core.mesh import MeshSpec
from megajax.cost import hlo
from megajax.cost.hlo import Module
from megajax.layers.mlp import MlpConfig
from megajax.models import decoder
from megajax.parallel import collective_matmul, expert_matmul, overlap, sharding, tensor
from megajax.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from megajax.serving import programs
from megajax.serving.engine import Engine
from megajax.systems.aot import QUICK
from megajax.training import step
from pallas_kernels import aot
from pallas_kernels.collective import api
from tests import tables
from tests.tiny import MODEL, run_config

LARGE, SMALL = (8192, 12288, (6144,)), (2048, 12288, (6144,))
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


def test_the_model_of_gpt3s_first_product():
    """Microseconds of an event simulation of 8 H100s (n 6144 a rank, k 12288), made apart."""
    plain = {512: 158, 1024: 307, 2048: 603, 4096: 1197, 8192: 2383, 16384: 4676}
    turned = {512: 686, 1024: 686, 2048: 686, 4096: 1008, 8192: 1975, 16384: 3907}
    for m in plain:
        times = overlap.simulate(GATHER, (m, 12288, (6144,)), 8, "bfloat16", CARDS["H100"], 132)
        assert [t * 1e6 for t in times] == pytest.approx([plain[m], turned[m]], abs=1)


def test_a_ring_is_chosen_where_it_clearly_gains(monkeypatch, tmp_path):
    def best(op, shape, dtype="bfloat16", kind=tables.H100, tensor=8, **others):
        mesh = tables.mesh(kind, **others, tensor=tensor)
        return overlap.best(op, shape, "tensor", dtype, mesh)

    large, small = LARGE, SMALL
    word, why = best(GATHER, large)
    assert word == "ring" and why.startswith("simulated, not measured")
    assert best(SCATTER, large)[0] == "ring"
    assert best(GATHER, small)[0] == best(SCATTER, small)[0] == "xla"
    # The same columns as 24 products, whose chunks fill the GPU badly.
    assert best(GATHER, (8192, 12288, (256,) * 24))[0] == "xla"
    assert best(GATHER, large, tensor=1) == ("xla", "one rank: nothing travels")
    assert best(GATHER, large, tensor=16)[0] == "xla"  # beyond a node nothing is known of the links
    assert best(GATHER, large, kind=tables.CPU) == ("xla", "a CPU has nothing to hide")
    monkeypatch.setitem(tables.CORES, "NVIDIA X1", 100)
    assert "nothing is known" in best(GATHER, large, kind="NVIDIA X1")[1]
    assert "so few rows" in best("matmul_all_reduce", small)[1]

    def table(**changes):
        rows = [
            tables.row(op, api.key(op, *sizes), **{"fastest": "fused"} | changes)
            for op, *sizes in (
                (GATHER, 8, 160, 12288, 6144),  # of 256 rows; far off 1024
                (GATHER, 4, 512, 12288, 6144),
                ("matmul_all_reduce", 8, 2048, 6144, 12288),
            )
        ]
        tables.write(monkeypatch, tmp_path, *rows)

    table(link="real")
    assert best(GATHER, small) == ("fused", overlap.MEASURED)
    assert best("matmul_all_reduce", small)[0] == "fused"
    assert best(GATHER, large) == (word, why)
    # Not where something may communicate beside the kernel, or its clique would leave the node.
    assert best(GATHER, small, tensor=4)[0] == "fused" != best(GATHER, small, data=2, tensor=4)[0]
    assert best(GATHER, small, node=2)[0] == "xla" and best(GATHER, small, "float32")[0] == "xla"
    for changes in ({"link": "emulated"}, {}, {"link": "real", "correct": False}):
        table(**changes)
        assert best(GATHER, small)[0] == "xla" and best(GATHER, large) == (word, why)
    # XLA was the fastest, where the model would take a ring.
    slow = {"fastest": "xla", "median_us": 2.0, "rivals": {"reference": 1.0}}
    for link, chosen in (("real", ("xla", overlap.MEASURED)), ("emulated", ("ring", why))):
        key = api.key(GATHER, 8, 1024, 12288, 6144)
        tables.write(monkeypatch, tmp_path, tables.row(GATHER, key, link=link, **slow))
        assert best(GATHER, large) == chosen


def test_a_gain_is_not_lost_in_the_backward_pass():
    """Never a choice whose two passes together the model puts behind plain XLA."""
    random = np.random.default_rng(0)
    for _ in range(200):
        rows, width, *parts = (int(2 ** random.uniform(7, 16)) // 8 * 8 for _ in range(4))
        shape = rows, width, tuple(parts)
        op, R = random.choice([GATHER, SCATTER]), int(random.choice([2, 4, 8]))
        plain, turned = overlap.simulate(op, shape, R, "bfloat16", CARDS["H100"], 132)
        mesh = tables.mesh(tables.H100, tensor=R)
        word = overlap.best(op, shape, "tensor", "bfloat16", mesh)[0]
        assert plain > 0 and turned > 0
        assert word == "xla" or (turned < 0.95 * plain and shape[0] >= 512 * R)
        assert word == "ring" or turned > 0.85 * plain or shape[0] < 1024 * R or plain < 1e-3


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 8}, None),
        ({"data": 1, "expert": 4}, None),
        ({"data": 16}, None),  # no product has a collective
        ({"data": 2, "tensor": 4}, "data 2 may hold SMs.*nearest: overlap=auto, or .*tensor=4"),
        ({"expert": 2, "tensor": 4}, "its tensor ranks alone: collectives over expert 2"),
        ({"pipe": 2, "context": 2, "tensor": 2}, "collectives over pipe 2, context 2"),
        ({"tensor": 16}, "at most 8 GPUs, those of a node, found 16.*mesh.tensor=8"),
        ({"node": 2, "expert": 8}, "at most 8 GPUs.*needs the GPUs for its expert ranks alone"),
    ],
)
def test_fused_kernels_are_refused_where_they_could_wait_for_ever(sizes, words):
    for overlap_word in ("auto", "ring", "xla", "fused"):
        if words is None or overlap_word != "fused":
            overlap.refuse_mesh(overlap_word, sizes)
        else:
            with pytest.raises(UserError, match=words + r".*\(--overlap, --mesh"):
                overlap.refuse_mesh(overlap_word, sizes)


def test_nothing_asynchronous_is_compiled_where_a_kernel_may_run(monkeypatch, tmp_path):
    def options(word, kind=tables.H100, unlike=False, **sizes):
        device = types.SimpleNamespace(platform="cpu" if kind == "cpu" else "gpu", device_kind=kind)
        sizes = {"pipe": 1, "data": 1, "expert": 1, "tensor": 1} | sizes
        mesh = types.SimpleNamespace(devices=np.array([device], object), shape=sizes)
        return overlap.compiler_options(word, mesh, unlike)

    for axis in ("tensor", "expert"):
        assert options("fused", **{axis: 4}) == overlap.IN_ORDER
    assert options("fused", data=4) is options("fused", kind="cpu", tensor=4) is None
    assert not any(options(word, tensor=4) for word in ("auto", "xla", "ring"))
    key = api.key(GATHER, 8, 160, 12288, 6144)
    for link, expected in (("emulated", None), ("real", overlap.IN_ORDER)):
        row = tables.row(GATHER, key, fastest="fused", link=link)
        tables.write(monkeypatch, tmp_path, row)
        assert options("auto", tensor=4) == expected
    # Unlike programs: nothing that orders collectives by how long other work takes.
    unordered = {"xla_gpu_enable_latency_hiding_scheduler": False}
    assert options("auto", unlike=True, data=8) == options("xla", unlike=True) == unordered
    assert options("auto", kind="cpu", unlike=True) is None
    # Somebody else's table, no other axis; whoever asked for something else gets that.
    assert options("auto", kind=tables.A100, tensor=4) is None
    assert options("auto", data=2, tensor=4) is options("ring", tensor=4) is None


def test_programs_are_compiled_with_these_options(monkeypatch):
    """The step, its two halves, evaluation and generation; not what makes the first state."""
    asked, got, jit = [], collections.Counter(), jax.jit

    def record(function, compiler_options=None, **others):
        got[str(compiler_options)] += 1
        return jit(function, **others)

    def options(*args):
        asked.append(args)
        return {"marked": 1}

    monkeypatch.setattr(jax, "jit", record)
    for module in (step, programs):
        monkeypatch.setattr(module, "compiler_options", options)
    cfg = run_config(mesh__tensor=2, mesh__data=1, overlap="ring")
    mesh = cfg.mesh.build()
    step.make_train_step(cfg, mesh)
    assert (asked, got["{'marked': 1}"]) == ([("ring", mesh, False)], 4)
    params = decoder.parts(cfg.model).init(jax.random.key(0))
    Engine(cfg.model, params, mesh=mesh, pages=3, overlap="ring")
    assert (asked, got["{'marked': 1}"]) == ([("ring", mesh, False), ("ring", mesh)], 4 + 9)


def test_one_function_knows_the_clique_of_a_kernel():
    """An axis of 4 ranks on 8 GPUs is asked for by hand only; on two nodes by nobody."""
    limits = functools.partial(api.reasons, GATHER, (64,), (64,), 4, "bfloat16")
    assert limits(tables.mesh(tables.H100, other=2, x=4)) == ()
    (why,) = limits(tables.mesh(tables.H100, other=4, x=4))
    assert why == "needs a whole mesh of at most 8 GPUs, those of a node, found 16"
    layer = expert_matmul.Layer(8192, 2, 4096, 1, (1792,), 4, 4, "bfloat16", 3)
    for sizes, count in (({"data": 2, "expert": 4}, 0), ({"data": 4, "expert": 4}, 1)):
        mesh = tables.mesh(tables.H100, **sizes)
        assert len(expert_matmul.fused_reasons("dispatch_grouped_matmul", layer, mesh)) == count


def test_what_cannot_run_is_refused_or_left_to_xla(monkeypatch):
    choose = functools.partial(
        tensor.choose_overlap, op=GATHER, shape=lambda: SMALL, dtype="float32"
    )
    lo, alone = (sharding.layout(MeshSpec(tensor=n, data=1).build()) for n in (2, 1))
    decode = sharding.layout(lo.mesh, decode=True)
    assert choose(lo, "ring") == "ring" and choose(lo, "auto") == choose(lo, "xla") == "xla"
    assert choose(alone, "ring") == choose(decode, "ring") == "xla"  # nothing travels, or is cut
    reduce = functools.partial(choose, op="matmul_all_reduce")
    assert reduce(decode, "ring") == reduce(decode, "auto") == "xla"
    with pytest.raises(NotImplementedError, match="matmul_all_reduce.*found cpu"):
        reduce(decode, "fused")
    with pytest.raises(UserError, match="Hopper GPUs, found cpu.*--overlap"):
        tensor.ops(lo, overlap="fused")
    monkeypatch.setattr(overlap, "refuse_fused", lambda *_: None)
    wide = sharding.layout(MeshSpec(tensor=2, data=4).build())
    tensor.ops(lo, overlap="fused")
    with pytest.raises(UserError, match="mesh.data=4, mesh.tensor=2.*data 4 may hold SMs"):
        tensor.ops(wide, overlap="fused")

    def own_matmul(x, w):
        raise AssertionError("not called")

    assert choose(lo, "auto", matmul=own_matmul) == "xla"
    with pytest.raises(NotImplementedError, match="plain products only.*--overlap=auto"):
        choose(lo, "ring", matmul=own_matmul)
    mlp = MlpConfig(64, 128, "swiglu", False, 0.02)
    assert tensor.explain_overlap(lo, "ring", 64, mlp, "float32") == "ring (asked for)"
    why = "xla (a CPU has nothing to hide)"
    assert tensor.explain_overlap(lo, "auto", 64, mlp, "float32") == f"MLP up {why}, MLP down {why}"


@pytest.mark.parametrize("keeps", [True, False])
def test_fused_gradients_are_those_of_plain_collectives(keeps, monkeypatch):
    """Around the kernels: everything but the kernels themselves, which are for GPUs."""
    monkeypatch.setattr(overlap, "fused_reasons", lambda *_: ())
    calls = []

    def gather(x, ws, biases, *, axis, spec, keep, turned=False):
        calls.append(GATHER)
        assert keep
        options = {"activation": spec.activation, "return_gathered": keep, "transpose_w": turned}
        return api.all_gather_matmul(x, ws, axis=axis, bias=biases, implementation="xla", **options)

    def scatter(xs, ws, bias, residual, *, axis, acc):
        calls.append(SCATTER)
        options = {"bias": bias, "residual": residual, "acc_dtype": acc}
        return api.matmul_reduce_scatter(xs, ws, axis=axis, implementation="xla", **options)

    kernels = vars(collective_matmul.kernels)
    stand_in = types.SimpleNamespace(**kernels | {"fused_gather": gather, "fused_scatter": scatter})
    monkeypatch.setattr(collective_matmul, "kernels", stand_in)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tensor",))
    random = np.random.default_rng(0)
    shapes = (8, 6), (6, 8), (6, 8), (8,), (8, 6), (8, 6), (6,), (8, 6)
    args = [random.normal(size=n).astype(np.float32) for n in shapes]
    rows, up, down = P("tensor"), P(None, "tensor"), P("tensor")
    specs = (rows, up, up, P("tensor"), down, down, P(), rows)

    def mlp(word, *args):
        x, gate, w_up, bias, first, second, offset, residual = args
        products = all_gather_matmul(
            x,
            [gate, w_up],
            axis="tensor",
            bias=[None, bias],
            activation="swiglu",
            implementation=word,
            return_gathered=keeps,
        )
        h = products[0] if keeps else products
        return matmul_reduce_scatter(
            (h, h * h),
            (first, second),
            axis="tensor",
            bias=offset,
            residual=residual,
            implementation=word,
        )

    def loss(word, *args):
        tensor = functools.partial(mlp, word)
        y = jax.shard_map(tensor, mesh=mesh, in_specs=specs, out_specs=rows)(*args)
        return (y**2).sum()

    fused, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, word), argnums=range(8)))(*args)
        for word in ("fused", "xla")
    )
    chex.assert_trees_all_close(fused, want, rtol=2e-5, atol=2e-4)
    assert calls == [GATHER, SCATTER, GATHER]


# ---- compiled for H100


def compiled_mlp(R, axes, both_ways, gradients=False):
    """The collectives of an MLP 2048 -> 8192 -> 2048 of 256 rows a rank, as rings."""
    text, shape = mlp_program(R, axes, both_ways, gradients)
    return hlo.collectives(text, shape)


def mlp_program(R, axes, both_ways, gradients=False, implementation="ring"):
    """Returns (the compiled text of that MLP, its mesh's sizes)."""
    sizes = {"data": 8 // R, "tensor": R} if R < 8 else {"tensor": R}
    mesh = jax.sharding.Mesh(
        np.array(aot.devices(-(-R // 8))).reshape(tuple(sizes.values())), tuple(sizes)
    )
    assert tuple(sizes) == axes
    rows, up, down = P(axes if R < 8 else "tensor"), P(None, "tensor"), P("tensor")
    options = {"axis": "tensor", "implementation": implementation, "both_ways": both_ways}

    def mlp(x, w_up, w_down):
        h = all_gather_matmul(x, w_up, activation="gelu_tanh", **options)
        # The way back of the second product is a gather, which may turn in one direction only.
        return matmul_reduce_scatter(h, w_down, **(options | {"both_ways": False}))

    sharded = jax.shard_map(mlp, mesh=mesh, in_specs=(rows, up, down), out_specs=rows)

    def program(x, w_up, w_down):
        if not gradients:
            return sharded(x, w_up, w_down)
        y, back = jax.vjp(sharded, x, w_up, w_down)
        return back(y)

    def like(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    args = like((256 * mesh.size, 2048), rows), like((2048, 8192), up), like((8192, 2048), down)
    compiled = aot.compile(
        jax.jit(program).lower(*args), QUICK | collective_matmul.compiler_options(both_ways)
    )
    return compiled.as_text(), dict(mesh.shape)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("R", "axes", "both_ways", "permutes"),
    [
        (8, ("tensor",), False, 14),
        (8, ("tensor",), True, 21),
        (4, ("data", "tensor"), False, 6),
        (4, ("data", "tensor"), True, 9),
        (16, ("tensor",), False, 30),  # in loops
    ],
)
def test_every_hop_has_one_product_beside_it(R, axes, both_ways, permutes):
    program = compiled_mlp(R, axes, both_ways)
    assert {c.kind for c in program} == {"collective-permute"}
    assert sum(c.arrays * c.executions for c in program) == permutes
    assert all(c.is_hidden and c.axes == ("tensor",) for c in program)
    # One chunk of 256 rows of one rank: none was joined with its neighbour.
    assert {c.flops_beside for c in program} == {2 * 256 * 2048 * 8192 // R}


@pytest.mark.aot
@pytest.mark.slow
def test_the_backward_pass_hides_all_of_its_communication():
    """Three rings: x in, y out, dy in for dx and dw; then x again and the sum of dx beside dw."""
    program = compiled_mlp(8, ("tensor",), both_ways=False, gradients=True)
    assert all(c.is_hidden for c in program)
    arrays = collections.Counter()
    for c in program:
        arrays[c.kind] += c.arrays
    assert arrays == {"collective-permute": 21, "all-gather": 1, "reduce-scatter": 1}


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(("R", "axes"), [(8, ("tensor",)), (4, ("data", "tensor"))])
def test_fused_products_have_their_communication_inside(R, axes):
    """Three kernels: x in, y out, dy in for dx and dw; x again and the sum of dx are XLA's."""
    text, shape = mlp_program(R, axes, False, gradients=True, implementation="fused")
    assert text.count('custom_call_target="mosaic_gpu') == 3
    sent = hlo.collectives(text, shape)
    assert {c.kind for c in sent} <= {"all-gather", "reduce-scatter", "all-reduce"}
    # Beside data parallelism XLA leaves x's second gather alone: nothing is claimed there.
    assert R < 8 or all(c.is_hidden for c in sent), sent


def waiting_beside(text, sizes):
    """Collectives that are in flight while a fused kernel runs, and all that are asynchronous."""
    sent = [c for c in hlo.collectives(text, sizes) if c.is_async]
    waits = [
        place.line
        for place in Module(text).places()
        if re.search(rf"({'|'.join(hlo.KINDS)})-start\(", place.line)
        and any("mosaic_gpu" in line for line in place.until_done())
    ]
    assert " async-start(" not in text  # another way to say it, which is not looked into here
    return waits, sent


@pytest.mark.aot
@pytest.mark.parametrize("alone", [False, True])
def test_a_gather_would_run_beside_a_fused_kernel(alone):
    """A kernel, and a gather over the same axis that has nothing to do with it."""
    R = 4
    mesh = jax.sharding.Mesh(np.array(aot.devices(1, 8)[:R]), "tensor")
    rows, up = P("tensor"), P(None, "tensor")

    def local(x, w, other):
        y = all_gather_matmul(x, w, axis="tensor", implementation="fused")
        return y, jax.lax.all_gather(other, "tensor", axis=0, tiled=True)

    def like(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    program = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, up, rows), out_specs=(up, P()), check_vma=False
    )
    args = like((256 * R, 1024), rows), like((1024, 512 * R), up), like((8192, 1024), rows)
    options = overlap.IN_ORDER if alone else {}
    text = aot.compile(jax.jit(program).lower(*args), QUICK | options).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 1 and "all-gather" in text
    waits, sent = waiting_beside(text, dict(mesh.shape))
    assert (len(waits), len(sent)) == ((0, 0) if alone else (1, 1))


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("word", ["xla", "fused"])
def test_a_fused_step_has_nothing_asynchronous_that_waits(word):
    """The compiled train step: its own options, not this test's."""
    model = dataclasses.replace(
        MODEL,
        layers=2,
        width=256,
        heads=4,
        kv_heads=4,
        head_width=64,
        mlp=512,
        vocab=1024,
        activation="gelu",
    )
    cfg = run_config(
        train__dtype="bfloat16",
        train__seq_len=512,
        train__global_batch=2,
        train__attention="xla",
        mesh__tensor=2,
        overlap=word,
    )
    cfg = dataclasses.replace(cfg, model=model)
    mesh = cfg.mesh.build(aot.devices(1, 2))
    train_step = step.make_train_step(cfg, mesh)
    lowered = train_step.step.lower(train_step.abstract_state, train_step.abstract_batch)
    text = aot.compile(lowered, QUICK).as_text()
    waits, sent = waiting_beside(text, dict(mesh.shape))
    assert not waits and bool(sent) == (word == "xla")
    assert ('custom_call_target="mosaic_gpu' in text) == (word == "fused")
    assert len(hlo.collectives(text, dict(mesh.shape))) > 4
