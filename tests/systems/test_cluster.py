"""Plans: compiled programs against hand counts, memory against its bound, planted faults."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from experiments.reports import plan as plan_report
from megajax.core import config
from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError
from megajax.core.hardware import parse_cluster
from megajax.cost import memory, traffic
from megajax.cost.hlo import KINDS, attributed, collectives, find
from megajax.layers.moe import MoeConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.systems import aot
from megajax.training.config import Config
from megajax.training.presets import PRESETS
from pallas_kernels import aot as target
from tests.tiny import run_config

HOST = parse_cluster("h100:1x8")
MODEL = DecoderConfig(
    layers=4,
    width=1024,
    heads=8,
    kv_heads=8,
    head_width=128,
    mlp=4096,
    vocab=8192,
    tied=False,
    activation="gelu",
    position="none",
)


def configured(**changes):
    settings = {
        "train.dtype": "bfloat16",
        "train.global_batch": 16,
        "train.seq_len": 2048,
        "train.loss_chunks": 4,
        "mesh.tensor": 4,
        "overlap": "xla",
    }
    changes = {k.replace("__", "."): v for k, v in changes.items()}
    return config.override(dataclasses.replace(Config(), model=MODEL), settings | changes)


# ---- without a compiler


def test_outlines_of_the_large_presets_on_their_clusters():
    cfg = config.override(PRESETS["megascale_175b"](), {"mesh.tensor": 8})
    planned = aot.outline(cfg, parse_cluster("h100:1536x8"))
    assert planned.misfit is None and planned.step.sizes["data"] == 1536
    assert 0 < planned.estimate.mfu_causal < planned.estimate.mfu_megatron < 1


def test_what_does_not_fit_is_not_compiled():
    cfg = config.override(PRESETS["megascale_175b"](), {"mesh.tensor": 8, "train.global_batch": 16})
    planned = aot.plan(cfg, parse_cluster("h100:2x8"))
    assert planned.compiled is None and planned.misfit == "optimizer"
    assert "DOES NOT FIT" in plan_report.verdict(planned)
    assert "largest term: optimizer" in plan_report.verdict(planned)


def test_idle_devices_are_refused():
    with pytest.raises(UserError, match="mesh uses 8 of the 16 devices"):
        aot.sizes(run_config(mesh__tensor=2, mesh__data=4), parse_cluster("h100:2x8"))


def test_a_missing_compiler_names_the_command(monkeypatch):
    def missing(*_):
        raise NotImplementedError("no plugin")

    monkeypatch.setattr(target, "devices", missing)
    with pytest.raises(UserError, match="uv sync --extra aot"):
        aot.compile_step(run_config(), HOST)


def test_reports_say_estimate_beside_every_time(tmp_path):
    planned = aot.outline(configured(), HOST)
    plan_report.write(planned, tmp_path)
    text = (tmp_path / "plan.md").read_text()
    for line in text.splitlines():
        if any(word in line for word in ("s a step", "tokens/s", "MFU", "Time of")):
            assert "estimate" in line, line
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["layer"] == "simulated" and figures["memory_xla_bytes"] is None
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_generation_is_planned_by_the_cost_model_alone():
    cfg = configured(train__accumulate=2)
    rows, tokens = cfg.train.global_batch, cfg.train.seq_len
    titles = {
        "prefill": f"prefill of {rows} rows of {tokens:,} tokens",
        "decode": f"a token for each of {rows} rows, cache of {tokens:,} tokens",
    }
    for phase, what in titles.items():
        planned = aot.outline(cfg, HOST, phase=phase)
        text = plan_report.markdown(planned)
        assert what in text and "| cache |" in text and "| optimizer |" not in text
        assert planned.step.accumulate == 1 and planned.misfit is None


def test_a_plan_that_prunes_says_which_sparsity_pays():
    settings = {"prune__sparsity": 0.75, "prune__tile": 64, "prune__chunk": 64, "train__steps": 200}
    text = plan_report.markdown(aot.outline(configured(**settings), HOST))
    assert "pays, forward (estimate)" in text and "| gain at 75% (estimate) |" in text
    assert "by tiles of 64 columns and 64 rows, at 0.8 of the dense" in text
    text = plan_report.markdown(aot.outline(configured(prune__pattern="ew", **settings), HOST))
    assert "None: ew leaves no tiles" in text
    assert "pays" not in plan_report.markdown(aot.outline(configured(), HOST))


# ---- deviceless compiles


@pytest.fixture(scope="module")
def planned():
    return aot.plan(configured(), HOST)


@pytest.mark.aot
def test_the_step_sends_what_the_cost_model_says(planned):
    """Bytes by axis and kind, within 2 %: norms and biases are not in the model."""
    assert attributed(planned.compiled.collectives) >= 0.99
    for axis in ("data", "tensor"):
        for kind in ("all-gather", "reduce-scatter"):
            ours, xlas = (
                sum(t.total for t in side if t.axes == (axis,) and t.kind == kind)
                for side in (traffic.transfers(planned.step), planned.compiled.collectives)
            )
            assert xlas == pytest.approx(ours, rel=0.02), (axis, kind)


@pytest.mark.aot
def test_the_step_executes_the_matmuls_of_the_formula(planned):
    assert planned.compiled.matmul_flops == pytest.approx(planned.step.workload.flops, rel=0.01)


@pytest.mark.aot
def test_memory_lies_between_the_bound_and_twice_it(planned):
    bound = memory.bound(planned.terms)
    assert bound <= planned.compiled.xla["peak"] <= 2 * bound
    state = planned.terms["parameters"] + planned.terms["optimizer"]
    assert planned.compiled.xla["arguments"] == pytest.approx(state, rel=0.01)
    assert memory.terms(planned.step)["parameters"] == pytest.approx(
        planned.terms["parameters"], rel=0.01
    )


@pytest.mark.aot
def test_our_step_has_no_trap_and_the_report_shows_the_program(planned):
    assert planned.warnings == () and planned.misfit is None
    text = plan_report.markdown(planned)
    assert "99.9" in text.split(" % of all bytes")[0][-7:] and "XLA: peak" in text
    assert text.count("| reduce-scatter |") + text.count("| all-gather |") >= 8


def assert_sent(planned, expected):
    """Bytes by axis and kind within 3 %."""
    for axis, kind in expected:
        ours, xlas = (
            sum(t.total for t in side if t.axes == (axis,) and t.kind == kind)
            for side in (traffic.transfers(planned.step), planned.compiled.collectives)
        )
        assert xlas == pytest.approx(ours, rel=0.03) and ours, (axis, kind)


MOE = MoeConfig(experts=8, top_k=2, width=2048)
MODES = {
    "dropless": MOE,
    "capacity": dataclasses.replace(MOE, mode="capacity", shared=1),
}


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_experts_send_and_hold_what_the_cost_model_says(mode):
    """Expert 4 x tensor 2. Bytes by axis and kind within 3 %: the router's scores, which its top-k
    gathers over expert, and weights of norms are not in the model."""
    model = dataclasses.replace(MODEL, layers=2, activation="swiglu", moe=MODES[mode])
    settings = {
        "train.dtype": "bfloat16",
        "train.global_batch": 8,
        "train.seq_len": 1024,
        "mesh.expert": 4,
        "mesh.tensor": 2,
        "overlap": "xla",
    }
    cfg = config.override(dataclasses.replace(Config(), model=model), settings)
    planned = aot.plan(cfg, HOST)
    assert attributed(planned.compiled.collectives) >= 0.99
    expected = {(axis, kind) for axis in ("expert", "tensor") for kind in KINDS[:2]}
    if mode == "capacity":
        expected.add(("expert", "all-to-all"))
    assert_sent(planned, expected)
    bound = memory.bound(planned.terms)
    assert bound <= planned.compiled.xla["peak"] <= 2 * bound
    assert memory.terms(planned.step)["parameters"] == pytest.approx(
        planned.terms["parameters"], rel=0.01
    )
    # Of grouped kernels, which read their rows' number as they run, those of balanced experts.
    flops = planned.step.workload.flops
    assert planned.compiled.matmul_flops == pytest.approx(flops, rel=0.01)


SPREAD = {(axis, kind) for axis in ("data", "tensor") for kind in KINDS[:2]}
PARALLEL = {
    # Two layers a chunk: of one, the rerun for B leaves out what only the next layer would need.
    "pipe": (
        {
            "model.layers": 8,
            "mesh.pipe": 2,
            "mesh.tensor": 2,
            "pipeline.microbatches": 4,
            "pipeline.schedule": "interleaved",
            "pipeline.chunks": 2,
        },
        SPREAD | {("pipe", "collective-permute"), ("pipe", "all-reduce")},
    ),
    "ring": ({"mesh.context": 4, "mesh.tensor": 2}, {("context", "collective-permute")}),
    "ulysses": (
        {"mesh.context": 4, "mesh.tensor": 2, "context.kind": "ulysses"},
        {("context", "all-to-all")},
    ),
}


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("name", list(PARALLEL))
def test_pipelines_and_contexts_send_what_the_cost_model_says(name):
    changes, expected = PARALLEL[name]
    planned = aot.plan(config.override(configured(mesh__tensor=1), changes), HOST)
    assert_sent(planned, expected)
    bound = memory.bound(planned.terms)
    assert bound <= planned.compiled.xla["peak"] <= 2 * bound
    if name != "pipe":
        flops = planned.step.workload.flops
        assert planned.compiled.matmul_flops == pytest.approx(flops, rel=0.01)


def small_mesh(**sizes):
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    devices = np.array(target.devices(1, 8)).reshape(shape)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Explicit,) * len(shape))


def compiled(function, mesh, *arrays):
    values = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in arrays
    ]
    with jax.set_mesh(mesh):
        text = target.compile(jax.jit(function).lower(*values)).as_text()
    return collectives(text, dict(mesh.shape))


@pytest.mark.aot
def test_an_mlp_sends_what_was_counted_by_hand():
    """Two layers, FSDP over data 4, TP over tensor 2: forward and the weights' gradients."""
    B, S, D, F, layers = 8, 512, 1024, 4096, 2

    def layer(x_BSD, weights):
        up, down = (
            reshard(w, P(*spec, reduced={"data"}))
            for w, spec in zip(weights, ((None, "tensor"), ("tensor", None)), strict=True)
        )
        gathered = reshard(x_BSD, P("data", None, None, reduced={"tensor"}))
        hidden = jnp.einsum("bsd,df->bsf", gathered, up, out_sharding=P("data", None, "tensor"))
        out = P("data", None, None, unreduced={"tensor"})
        y = jnp.einsum("bsf,fd->bsd", jax.nn.relu(hidden), down, out_sharding=out)
        return reshard(y, P("data", "tensor", None)), None

    def loss(ups, downs, x):
        return (jax.lax.scan(layer, x, (ups, downs))[0].astype(jnp.float32) ** 2).sum()

    mesh = small_mesh(data=4, tensor=2)
    program = compiled(
        jax.grad(loss, (0, 1)),
        mesh,
        ((layers, D, F), P(None, "data", "tensor")),
        ((layers, F, D), P(None, "tensor", "data")),
        ((B, S, D), P("data", "tensor", None)),
    )
    weights, stream = 2 * D * F * 2 // 2, B // 4 * S * D * 2
    by_hand = {
        # No remat: weights and inputs are gathered once and kept.
        ("data", "all-gather"): layers * weights,
        ("data", "reduce-scatter"): layers * weights,
        # Forward one gather and one scatter a layer; backward their mirrors.
        ("tensor", "all-gather"): 2 * layers * stream,
        ("tensor", "reduce-scatter"): 2 * layers * stream,
    }
    for (axis, kind), expected in by_hand.items():
        got = sum(c.total for c in program if c.axes == (axis,) and c.kind == kind)
        assert got == pytest.approx(expected, rel=0.02), (axis, kind)


@pytest.mark.aot
def test_planted_collectives_in_a_tick_loop_are_reported():
    """A loop that sends over pipe, and gathers weights and scatters gradients over data in it."""
    mesh = small_mesh(pipe=2, data=4)

    def ticks(w, x, inside):
        def tick(x, _):
            y = jax.lax.ppermute(x, "pipe", [(0, 1), (1, 0)])
            if inside:
                gathered = jax.lax.all_gather(
                    w * jax.lax.optimization_barrier(y[0, 0]), "data", axis=0, tiled=True
                )
                y = y + jax.lax.psum_scatter(
                    y @ gathered, "data", scatter_dimension=0, tiled=True
                ).sum(0, keepdims=True)
            return jnp.tanh(y), None

        return jax.lax.scan(tick, x, None, length=5)[0]

    def warnings(inside):
        body = functools.partial(ticks, inside=inside)
        specs = (P("data", None), P(("pipe", "data"), None))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
        program = compiled(mapped, mesh, ((1024, 1024), specs[0]), ((8192, 1024), specs[1]))
        return find(program, ("data",))

    assert warnings(False) == []
    assert {w.split(" inside")[0] for w in warnings(True)} == {"all-gather", "reduce-scatter"}


@pytest.mark.aot
def test_a_planted_gather_of_the_embeddings_updates_is_reported():
    """A pipeline manual over pipe alone: the compiler scatters the input's gradients into
    the whole table in every tick, so it gathers them over data."""
    T, V, B, S, D = 5, 4096, 8, 512, 1024
    shape = [{"pipe": 2, "data": 2, "tensor": 2}.get(axis, 1) for axis in MESH_AXES]
    devices = np.array(target.devices(1, 8)).reshape(shape)
    mesh = Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))

    def ticks(table, x, embeds):
        def tick(carry, number):
            x, total = carry
            x = jax.lax.ppermute(x, "pipe", [(0, 1), (1, 0)])
            if embeds:
                ids = (jnp.arange(B * S, dtype=jnp.int32).reshape(B, S) * 7 + number) % V
                total = total + jax.vjp(lambda table: table[ids], table)[1](x)[0]
            return (jnp.tanh(x), total), None

        return jax.lax.scan(tick, (x, jnp.zeros_like(table)), jnp.arange(T))[0]

    def warnings(embeds):
        mapped = jax.shard_map(
            functools.partial(ticks, embeds=embeds),
            mesh=mesh,
            in_specs=(P(), P("pipe")),
            out_specs=(P("pipe"), P()),
            axis_names={"pipe"},
            check_vma=False,
        )
        rows = P(("pipe", "data"), None, None)
        program = compiled(mapped, mesh, ((V, D), P("tensor", "data")), ((2 * B, S, D), rows))
        return find(program, ("data",))

    (warning,) = warnings(True)
    assert "all-gather inside the pipeline's tick loop: 40" in warning and "5 x" in warning
    assert not warnings(False)


@pytest.mark.aot
def test_a_planted_lookup_is_reported():
    """`table[ids]` of a table cut over data: its gradient is summed whole on every device."""
    mesh = small_mesh(data=4, tensor=2)

    def loss(table, x):
        rows = jnp.arange(8 * 512, dtype=jnp.int32).reshape(8, 512) % 4096
        ids = reshard(rows, P("data", None))
        gathered = reshard(table, P(None, None))
        looked_up = gathered.at[ids].get(out_sharding=P("data", "tensor", None))
        return (looked_up * x).astype(jnp.float32).sum()

    program = compiled(
        jax.grad(loss),
        mesh,
        ((4096, 1024), P("tensor", "data")),
        ((8, 512, 1024), P("data", "tensor", None)),
    )
    assert any("reduce-scatter belongs" in w for w in find(program, ("data",)))
