"""The compiled H100 program holds exactly the collectives that the design says.

Every line reads entry, block loop and loss loop, because block counts alone stay right when the
gradient of the embedding or of the head goes wrong. The last tests break the layout on purpose.
"""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from megajax.core import config
from megajax.core.hardware import parse_cluster
from megajax.core.mesh import MeshSpec
from megajax.cost import memory
from megajax.cost.hlo import Collective, collectives
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import map_words
from megajax.parallel import sharding, tensor
from megajax.parallel.pipeline import Pipeline, PipelineConfig
from megajax.systems.aot import QUICK, outline
from megajax.systems.aot import compile_step as whole_step
from megajax.training.config import Config
from megajax.training.presets import PRESETS
from megajax.training.step import make_train_step
from pallas_kernels import aot

pytestmark = pytest.mark.aot

MIB = 2**20
ZERO = {"node", "data", "expert", "context"}
MODEL = DecoderConfig(
    layers=4, width=2048, heads=16, kv_heads=8, head_width=128, mlp=5632, vocab=32768, tied=False
)
LEARNED = dataclasses.replace(
    MODEL, position="learned", max_positions=4096, tied=True, norm="layer", bias="all"
)


def compile_program(nodes=1, model=MODEL, **changes):
    """Returns (the compiled step, its mesh)."""
    base = dataclasses.replace(Config(), model=model)
    settings = {
        "train.dtype": "bfloat16",
        "train.global_batch": 16,
        "train.seq_len": 4096,
        "train.loss_chunks": 4,
        "train.attention": "xla",
        "overlap": "xla",
    }
    changes = {k.replace("__", "."): v for k, v in changes.items()}
    cfg = config.override(base, settings | changes)
    mesh = cfg.mesh.build(aot.devices(nodes))
    train_step = make_train_step(cfg, mesh)
    lowered = train_step.step.lower(train_step.abstract_state, train_step.abstract_batch)
    return aot.compile(lowered, QUICK), mesh


def compile_step(nodes=1, model=MODEL, **changes) -> list[Collective]:
    compiled, mesh = compile_program(nodes, model, **changes)
    return collectives(compiled.as_text(), dict(mesh.shape))


def place(c: Collective) -> str:
    """Where a collective runs: block loop, loss loop or entry, forward or backward."""
    where = "blocks" if c.within("blocks") else "head" if c.within("head") else "entry"
    return f"{where} {'backward' if c.is_backward else 'forward'}"


def large_gradient_all_reduces(sent: list[Collective], over=ZERO) -> list[str]:
    """Any all-reduce above 1 MiB that touches a ZeRO axis, wherever it stands."""
    return [
        f"{place(c)}: {c.nbytes / MIB:.0f} MiB over {c.axes} ({c.op_name})"
        for c in sent
        if c.kind == "all-reduce" and set(c.axes) & over and c.nbytes > MIB
    ]


def tensor_counts(sent: list[Collective], where: str) -> dict[str, int]:
    """{kind: arrays} of the collectives over tensor alone that carry activations."""
    counts: dict[str, int] = collections.Counter()
    for c in sent:
        if place(c) == where and c.axes == ("tensor",) and c.nbytes > MIB:
            counts[c.kind] += c.arrays
    return dict(counts)


def zero_counts(sent: list[Collective], where: str) -> dict[str, int]:
    counts: dict[str, int] = collections.Counter()
    for c in sent:
        if place(c) == where and set(c.axes) & ZERO and c.nbytes > MIB:
            counts[c.kind] += c.arrays
    return dict(counts)


@pytest.fixture(scope="module")
def serial():
    return compile_step(mesh__tensor=4)


def check_gradients(sent):
    assert not large_gradient_all_reduces(sent)
    # Seven block weights are gathered twice (again in the backward pass) and scattered once.
    assert zero_counts(sent, "blocks forward") == {"all-gather": 7}
    assert zero_counts(sent, "blocks backward") == {"all-gather": 7, "reduce-scatter": 7}
    # Embedding and head: gathered once, their gradients reduce-scattered once, outside the loops.
    assert zero_counts(sent, "entry forward") == {"all-gather": 2}
    assert zero_counts(sent, "entry backward") == {"reduce-scatter": 2}
    for loop in ("head forward", "head backward"):
        assert not zero_counts(sent, loop) and not tensor_counts(sent, loop)


def test_serial_block(serial):
    check_gradients(serial)
    assert tensor_counts(serial, "blocks forward") == {"all-gather": 2, "reduce-scatter": 2}
    # Recomputed inputs (2) and the transposes of the forward scatters (2); one scatter each.
    assert tensor_counts(serial, "blocks backward") == {"all-gather": 4, "reduce-scatter": 2}
    assert all(c.loops == (4,) for c in serial if place(c).startswith("blocks"))


def test_parallel_block():
    sent = compile_step(mesh__tensor=4, model__block="parallel")
    check_gradients(sent)
    assert tensor_counts(sent, "blocks forward") == {"all-gather": 1, "reduce-scatter": 1}
    assert tensor_counts(sent, "blocks backward") == {"all-gather": 2, "reduce-scatter": 1}


def test_learned_positions_biases_and_tied_head():
    """The position table's gradient is scattered like the token table's."""
    sent = compile_step(model=LEARNED, mesh__tensor=4)
    assert not large_gradient_all_reduces(sent)
    assert tensor_counts(sent, "blocks forward") == {"all-gather": 2, "reduce-scatter": 2}


def test_accumulation_and_context_scatter_too():
    sent = compile_step(mesh__tensor=2, mesh__context=2, train__accumulate=2)
    assert not large_gradient_all_reduces(sent)
    assert tensor_counts(sent, "blocks forward") == {"all-gather": 2, "reduce-scatter": 2}
    assert {c.loops for c in sent if place(c) == "blocks forward"} == {(2, 4)}


def test_hybrid_sharding_reduces_only_the_shard_between_nodes():
    sent = compile_step(nodes=2, mesh__node=2, mesh__tensor=4, shard__zero="hybrid")
    assert not large_gradient_all_reduces(sent, ZERO - {"node"})
    between = [c for c in sent if c.kind == "all-reduce" and c.axes == ("node",)]
    scattered = [c for c in sent if c.kind == "reduce-scatter" and c.axes == ("data",)]
    # What is summed between nodes is what the scatter inside the node left: half of it (data 2).
    assert sum(c.nbytes * c.executions for c in between) == pytest.approx(
        sum(c.nbytes * c.executions for c in scattered) / 2, rel=0.01
    )


@pytest.mark.slow
def test_rings_hide_what_blocks_send_over_tensor():
    """Plain: two gathers and two scatters a pass, none with a product beside it in the forward."""
    hops = [c for c in compile_step(mesh__tensor=4, overlap="ring") if c.axes == ("tensor",)]
    hops = [c for c in hops if c.nbytes > MIB]
    assert not [c for c in hops if c.kind == "all-reduce"]
    for where, sent in (
        ("blocks forward", {"collective-permute": 12}),
        # dy of both ends; x again, and the sums of dx, beside the products of dw.
        ("blocks backward", {"collective-permute": 12, "all-gather": 2, "reduce-scatter": 2}),
    ):
        assert tensor_counts(hops, where) == sent
        hidden = [c.is_hidden for c in hops if place(c) == where]
        assert sum(hidden) >= (1 if "forward" in where else 0.8) * len(hidden)


@pytest.mark.slow
def test_a_ring_travels_while_it_works_and_needs_little_memory():
    """32,768 tokens over 4 devices; gathered keys hold float32 logits of 8,192 x 32,768."""
    ring, gather = (
        compile_program(
            mesh__context=4,
            mesh__tensor=2,
            context__kind=kind,
            train__global_batch=1,
            train__seq_len=32768,
            train__loss_chunks=16,
        )[0]
        for kind in ("ring", "gather")
    )
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (ring, gather)]
    assert temporary[0] < 2**31 and temporary[0] < 0.1 * temporary[1], temporary
    # A loop over hops whose keys leave before the work on their forerunners and arrive after it.
    order = re.compile(
        r"collective-permute-start\((?:(?!collective-permute-done).)* while\("
        r".*?collective-permute-done\(",
        re.DOTALL,
    )
    loops = [c for c in ring.as_text().split("\n\n") if order.search(c)]
    assert len(loops) >= 2  # forward, backward


def test_gradients_that_are_not_scattered_are_caught():
    sent = compile_step(mesh__tensor=4, shard__zero="none")
    wrong = large_gradient_all_reduces(sent)
    assert any("blocks" in line for line in wrong), wrong
    with pytest.raises(AssertionError):
        check_gradients(sent)


def test_a_plain_lookup_is_caught(monkeypatch):
    """`table[ids]` all-reduces the whole table's gradient; the blocks look as they should."""

    def plain(layout, pairs, dtype):
        out = layout.act("batch", "seq", None, residual=True)
        ((table, ids),) = pairs
        gathered = reshard(table[...].astype(dtype), P(None, None))
        return gathered.at[ids].get(out_sharding=out)

    monkeypatch.setattr(tensor, "lookup", plain)
    sent = compile_step(mesh__tensor=4)
    assert tensor_counts(sent, "blocks forward") == {"all-gather": 2, "reduce-scatter": 2}
    assert large_gradient_all_reduces(sent)


def test_the_deviceless_target_is_an_h100():
    devices = aot.devices(2)
    assert len(devices) == 16 and "H100" in devices[0].device_kind
    assert jax.devices()[0].platform == "cpu"


# ---- pipelines


def compile_pipeline(microbatches: int):
    """32 layers of width 4096 on 8 stages, bf16, one row a microbatch: gradients alone."""
    layout = sharding.layout(MeshSpec(pipe=8).build(aot.devices(1)))
    model = DecoderConfig(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=32,
        head_width=128,
        mlp=16384,
        vocab=65536,
        activation="gelu_tanh",
        tied=False,
    )
    with jax.set_mesh(layout.mesh):
        parts = decoder.parts(model, None, tensor.local_ops(layout, "xla"), "bfloat16")
        cfg = PipelineConfig("1f1b", microbatches)
        pipe = Pipeline(parts, layout, cfg, jnp.dtype("bfloat16"), "full")

        def like(words, x):
            spec = layout.named(layout.stored(*words))
            return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=spec)

        everywhere = layout.named(P())
        rows = jax.ShapeDtypeStruct((microbatches, 1, 2048), jnp.int32, sharding=everywhere)
        total = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)

        def gradients(params, batch, route, total):
            return pipe.gradients(params, batch, route, lambda s, n: s.cross_entropy / n, total)

        def on_every_device(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

        batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), rows)
        params = map_words(like, parts.axes, parts.abstract)
        route = jax.tree.map(on_every_device, cfg.route(8))
        lowered = jax.jit(gradients).lower(params, batch, route, total)
        return aot.compile(lowered, QUICK), cfg.table(8)


@pytest.mark.slow
def test_a_pipelines_memory_does_not_grow_with_its_microbatches():
    few, table = compile_pipeline(16)
    many, _ = compile_pipeline(64)
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (few, many)]
    assert abs(temporary[1] - temporary[0]) <= 0.05 * temporary[0]
    assert max(temporary) <= 3.5 * 2**30
    # The loops that run are the table's phases; the others are the layers of a chunk.
    trips = [int(n) for n in re.findall(r'known_trip_count.{0,8}"n":"(\d+)"', few.as_text())]
    assert [n for n in trips if n != 4] == [phase.ticks for phase in table.phases] == [7, 16, 7]


PIPED = {
    "mesh.pipe": 2,
    "mesh.data": 2,
    "mesh.tensor": 2,
    "pipeline.microbatches": 4,
    "train.seq_len": 2048,
}


def over_data(sent):
    return [c for c in sent if c.nbytes > MIB and set(c.axes) & ZERO]


def test_ticks_hide_the_weights_of_other_chunks():
    """Interleaved, two chunks: the first gather and the last scatter are exposed, no others."""
    chunks = {"pipeline.schedule": "interleaved", "pipeline.chunks": 2}
    sent = compile_step(**PIPED, **chunks)
    assert {c.bodies[-1] for c in sent if c.bodies and c.axes == ("pipe",)}  # ticks exchange
    weights = over_data(sent)
    assert not [place(c) for c in weights if c.bodies]  # and never touch the weights
    for kind in ("all-gather", "reduce-scatter"):
        arrays = collections.Counter()
        for c in weights:
            arrays[c.is_hidden] += c.arrays * (c.kind == kind)
        assert arrays == {True: 7, False: 9}, kind  # seven matrices; embedding and head besides
    assert sum(c.arrays for c in weights) == 32


@pytest.mark.slow
def test_a_finished_chunk_keeps_no_copy_of_the_sums_of_all():
    """70B as 4 chunks of 5 layers a stage, whose sums of gradients are 16.4 GiB: at most 2.5
    times these beside the other terms. (A copy for each chunk made it 123 GiB.)"""
    cfg = PRESETS["llama3_70b"]()
    cfg = config.override(cfg, {
        "mesh.pipe": 4, "mesh.context": 2, "mesh.tensor": 4, "train.seq_len": 8192,
        "train.global_batch": 64, "train.remat": "dots", "pipeline.schedule": "interleaved",
        "pipeline.microbatches": 64, "pipeline.chunks": 4, "pipeline.stash": "residuals",
    })  # fmt: skip
    cluster = parse_cluster("h100:4x8")
    terms = outline(cfg, cluster).terms
    others = memory.bound(terms) - terms["gradients"]
    sums = 4 * 70.6e9 / (4 * 4)
    assert whole_step(cfg, cluster).xla["peak"] - others < 2.5 * sums


@pytest.mark.slow
def test_data_collectives_leave_the_tick_loop_unless_asked():
    once = over_data(compile_step(**PIPED))
    assert {c.kind for c in once} == {"all-gather", "reduce-scatter"}
    assert not [place(c) for c in once if c.bodies]
    every = over_data(compile_step(**PIPED, pipeline__gradients="sharded"))
    assert {c.kind for c in every if c.bodies} == {"reduce-scatter"}  # asked for: in every tick
