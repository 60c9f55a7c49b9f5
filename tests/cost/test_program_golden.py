"""A step's records beside golden files, and the counts that Mosaic GPU kernels export."""

import dataclasses
import functools
import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from megajax.cost import program_body
from megajax.cost.program import records
from pallas_kernels import aot, work
from pallas_kernels.attention.cases import Case as AttentionCase
from pallas_kernels.gemm.cases import Case as GemmCase
from pallas_kernels.grouped.cases import Case as GroupedCase
from pallas_kernels.norm.cases import Case as NormCase
from pallas_kernels.quant_gemm.cases import Case as QuantCase
from tests.program_cases import STEP, golden_cpu, golden_h100, summary

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
PLATFORMS = {"cpu": "cpu", "h100": "gpu"}


def golden(name):
    text = gzip.decompress((GOLDEN / f"program_{name}.hlo.gz").read_bytes()).decode()
    return text, json.loads((GOLDEN / f"program_{name}.json").read_text())


@pytest.mark.parametrize("name", PLATFORMS)
def test_records_of_a_step_are_those_of_the_golden_file(name):
    text, expected = golden(name)
    assert summary(records(text, platform=PLATFORMS[name])) == expected


@pytest.mark.parametrize("name", PLATFORMS)
def test_the_products_of_the_golden_files_are_those_of_the_step(name):
    """Counted by hand: three layers, the logits, one of two branches; a convolution."""
    _, rows = golden(name)
    (V, D), (L, *_), (T,), (N, H, W, C) = (STEP[n] for n in ("table", "ws", "ids", "image"))
    F, logits = STEP["filters"][3], 2 * T * D * V
    flops = sum(r["flops"] * r["executions"] for r in rows if r["kind"] == "product")
    epilogue = 2 * T * V - T if name == "cpu" else 0  # the softmax's difference and sums
    assert flops in (L * 2 * T * D * D + logits + 2 * T * D * D + e for e in (0, epilogue))
    [conv] = [r["flops"] for r in rows if r["kind"] == "convolution"]
    assert conv == 2 * N * F * C * (3 * H - 2) * (3 * W - 2)
    assert [r["executions"] for r in rows if r["kind"] == "collective"] == [L] * (name != "cpu")


def test_the_golden_step_compiles_to_the_same_products():
    """Other CPUs may fuse in other ways; what is multiplied is the same."""
    text, _ = golden("cpu")

    def products(launched):
        return sorted(
            (r.executions, *r.features[4:8])
            for r in launched
            if r.kind in ("product", "convolution")
        )

    assert products(records(golden_cpu())) == products(records(text))


@pytest.mark.aot
def test_the_golden_step_compiles_to_the_same_records_on_an_h100():
    _, expected = golden("h100")
    assert summary(records(golden_h100())) == expected


CALL = """HloModule c, is_scheduled=true

ENTRY %main (x: bf16[BATCH,16]) -> bf16[BATCH,8] {
  %x = bf16[BATCH,16]{1,0} parameter(0)
  ROOT %c = bf16[BATCH,8]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", OP_NAME
}
"""


def scope_of(done, operands, made):
    """The name of the scope that a kernel is launched in."""

    def launch(x):
        with done.scope(operands, made):
            return x + 1

    [eqn] = jax.make_jaxpr(launch)(1.0).eqns
    return str(eqn.source_info.name_stack)


def test_a_kernel_says_its_work_in_its_name():
    """Of four rows under jax.vmap four times as much."""
    one, out = (jax.ShapeDtypeStruct((64, n), jnp.bfloat16) for n in (16, 8))
    name = scope_of(work.product("fused_gemm", 64, 8, 16), [one, None], [out])
    for rows in (1, 4):
        text = CALL.replace("BATCH", str(64 * rows))
        text = text.replace("OP_NAME", f'metadata={{op_name="jit(f)/{name}/mpmd_map"}}')
        [record] = records(text, platform="gpu")
        assert record.kind == ("product" if rows == 1 else "batched_product")
        assert record.flops == rows * 2 * 64 * 8 * 16
        assert record.nbytes == rows * 2 * 64 * (16 + 8)
        assert [record[f] for f in ("batch", "m", "n", "k")] == [rows, 64, 8, 16]
        assert record.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["attention_forward", "quant_matmul"])
def test_a_kernels_arithmetic_has_the_type_of_what_it_multiplies(name):
    """Not of the rotations or slopes before it, nor of scales that are more than the rows."""
    one, out = (jax.ShapeDtypeStruct((4, n), jnp.bfloat16) for n in (16, 8))
    scales = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    scope = scope_of(work.product(name, 4, 8, 16), [scales, one], [out])
    text = CALL.replace("BATCH", "4").replace("(x: bf16", "(s: f32[32,64], x: bf16")
    text = text.replace("  %x =", "  %s = f32[32,64]{1,0} parameter(1)\n  %x =")
    text = text.replace("call(%x)", "call(%s, %x)")
    text = text.replace("OP_NAME", f'metadata={{op_name="jit(f)/{scope}/mpmd_map"}}')
    [record] = records(text, platform="gpu")
    assert record.dtype == "bfloat16"


def test_packed_segments_leave_fewer_pairs_and_as_many_bytes():
    like = [jax.ShapeDtypeStruct((64, n), jnp.bfloat16) for n in (16, 8)]
    scope = scope_of(work.attention("attention_forward", 64 * 64, 1, (64, 64, 16), 2), *zip(like))
    text = CALL.replace("BATCH", "64")
    text = text.replace("OP_NAME", f'metadata={{op_name="jit(f)/{scope}/mpmd_map"}}')
    [full], [quarter] = (records(text, platform="gpu", live_pairs=x) for x in (1, 0.25))
    assert full.flops == 4 * 64 * 64 * 16
    assert (quarter.flops, quarter["flops"]) == (full.flops / 4, full.flops / 4)
    assert (quarter.nbytes, quarter["m"]) == (full.nbytes, 64)
    assert quarter.hash != full.hash


def test_every_kernel_is_launched_with_its_work():
    folder = pathlib.Path(pallas_kernels.__file__).parent
    texts = {path: path.read_text() for path in folder.rglob("*.py")}
    launches = {p: t for p, t in texts.items() if "plgpu.kernel(" in t or "engine.launch(" in t}
    assert len(launches) > 12
    for path, text in launches.items():
        assert ".scope(" in text or "work=" in text, path


@pytest.mark.parametrize("window", [None, (2, 0), (3, 1), (None, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_of_a_mask_are_those_that_are_counted_one_by_one(causal, window):
    for n, longest in ((7, None), (12, 5), (4, 9)):
        left, right = window or (None, None)
        right = 0 if causal else right
        each = min(longest or n, n)
        brute = sum(
            (left is None or i - j <= left) and (right is None or j - i <= right)
            for i in range(n)
            for j in range(n)
            if i // each == j // each
        )
        assert work.most_pairs(n, n, causal, window, longest) == brute
    assert work.most_pairs(0, 5, causal, window) == 0


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 3), (True, 50)])
def test_cudnns_pairs_are_those_that_are_counted_one_by_one(causal, window):
    for queries, keys in ((7, 7), (5, 9)):
        reach = window or keys
        brute = sum(not causal or i - reach < j <= i for i in range(queries) for j in range(keys))
        assert program_body.useful_pairs(queries, keys, causal, window) == brute


def aot_records(function, *arrays):
    one = jax.sharding.SingleDeviceSharding(aot.devices()[0])
    operands = [jax.ShapeDtypeStruct(s, d, sharding=one) for s, d in arrays]
    return records(aot.compile(jax.jit(function).lower(*operands)))


BF16, I32 = jnp.bfloat16, jnp.int32
HOPPER = {"implementation": "hopper"}


@pytest.mark.aot
def test_gemms_export_their_cases_flops_and_bytes():
    case = GemmCase("", 512, 384, 256, bias=True)
    [record] = [
        r
        for r in aot_records(
            lambda x, w, b: pallas_kernels.fused_gemm(x, w, bias=b, **HOPPER),
            ((512, 256), BF16),
            ((256, 384), BF16),
            ((384,), jnp.float32),
        )
        if r.kind == "product"
    ]
    assert (record.flops, record.nbytes) == (case.flops(), case.bytes())


@pytest.mark.aot
def test_products_with_packed_weights_export_their_cases_flops_and_bytes():
    case = QuantCase("", 1024, 4096, 256, 4, activation="silu")
    [record] = [
        r
        for r in aot_records(
            lambda x, w, s: pallas_kernels.quant_matmul(
                x, w, s, bits=4, group=128, activation="silu", **HOPPER
            ),
            ((1024, 256), BF16),
            ((128, 4096), jnp.uint8),
            ((2, 4096), jnp.float32),
        )
        if r.kind == "product"
    ]
    assert (record.flops, record.nbytes) == (case.flops(), case.bytes())


@pytest.mark.aot
def test_grouped_products_export_their_cases_flops():
    """Beside the case's bytes are the groups' tables: less than a thousandth."""
    case = GroupedCase("", 512, 4, 256, 384)

    def loss(x, w, sizes):
        y = pallas_kernels.grouped_matmul(x, w, sizes, **HOPPER)
        return (y.astype(jnp.float32) ** 2).sum()

    launched = aot_records(
        jax.grad(loss, argnums=(0, 1)), ((512, 256), BF16), ((4, 256, 384), BF16), ((4,), I32)
    )
    launched = [r for r in launched if r.kind == "product"]
    assert sum(r.flops for r in launched) == case.flops() + case.flops(backward=True)
    assert launched[0].nbytes == pytest.approx(case.bytes(), rel=1e-3)


@pytest.mark.aot
@pytest.mark.parametrize("packed", [False, True])
def test_attention_exports_the_pairs_of_full_segments(packed):
    """Forward the case's FLOPs; backward 3 + 4 products, of which the case has the 5 that differ.

    Bytes: beside the case's, which every kernel reads once, are intervals of rows.
    """
    case = AttentionCase("", (128,) * 4, (4, 2), 64, causal=True)
    lead = (4, 128) if packed else (512,)

    def loss(q, k, v, segments):
        if packed:
            out = pallas_kernels.packed_attention(
                q, k, v, segment_ids=segments, causal=True, **HOPPER
            )
        else:
            out = pallas_kernels.varlen_attention(
                q, k, v, cu_seqlens_q=segments, causal=True, max_seqlen=128, **HOPPER
            )
        return (out.astype(jnp.float32) ** 2).sum()

    launched = aot_records(
        jax.grad(loss, argnums=(0, 1, 2)),
        ((*lead, 4, 64), BF16),
        ((*lead, 2, 64), BF16),
        ((*lead, 2, 64), BF16),
        ((4, 128) if packed else (5,), I32),
    )
    kernels = sorted(r.flops for r in launched if r.kind == "attention")
    assert kernels == [case.flops(), 1.5 * case.flops(), 2 * case.flops()]
    forward = min((r for r in launched if r.kind == "attention"), key=lambda r: r.flops)
    assert forward.nbytes == pytest.approx(case.bytes(), rel=0.05)


@pytest.mark.aot
def test_norms_export_their_cases_flops_and_bytes():
    case = NormCase("", 1024, 512, centred=False, added=False)
    launched = aot_records(
        lambda x, scale: pallas_kernels.fused_layer_norm(x, scale=scale, kind="rms", **HOPPER)[0],
        ((1024, 512), BF16),
        ((512,), jnp.float32),
    )
    [one] = [r for r in launched if r.flops == case.flops()]
    assert one.kind == "reduction" and one.nbytes == pytest.approx(case.bytes(), rel=0.01)


@pytest.mark.aot
def test_paged_attention_exports_full_tables():
    """Two tokens of two sequences, each with a table of 8 pages of 64 positions."""
    T, H, G, K, N, M, P = 2, 8, 2, 128, 64, 8, 40
    launched = aot_records(
        lambda *a: pallas_kernels.paged_attention(*a, **HOPPER),
        ((T, H, K), BF16),
        ((P, N, G, K), BF16),
        ((P, N, G, K), BF16),
        ((2, M), I32),
        *[((2,), I32)] * 3,
    )
    [one] = [r for r in launched if r.kind == "attention"]
    assert one.flops == 4 * T * M * N * H * K
    pages = 2 * 2 * (2 * M * N * G * K)  # keys and values of 16 bits; tables, not the whole pool
    assert pages <= one["bytes_read"] < 1.1 * pages


@pytest.mark.aot
def test_quantizers_export_their_cases_flops_and_bytes():
    from pallas_kernels.quantize import configs, hopper

    case = dataclasses.replace(
        next(c for c in configs.CASES if c.op == "dequantize_add"), elements=2**20
    )
    problem, call, arrays = configs.kernel(case)
    call = functools.partial(call, tile=hopper.heuristic(problem))
    launched = aot_records(call, *((a.shape, a.dtype) for a in arrays))
    [one] = [r for r in launched if r.flops]
    assert one.flops == case.flops() and one.nbytes == pytest.approx(case.bytes(), rel=0.01)


@pytest.mark.aot
def test_a_fused_collective_exports_its_ranks_product():
    """An all-gather and product of 96 rows of each of 8 ranks with (512, 256)."""
    mesh = jax.make_mesh((8,), ("x",), devices=aot.devices(1, 8))

    def array(size, spec):
        return jax.ShapeDtypeStruct(size, BF16, sharding=jax.NamedSharding(mesh, spec))

    specs = jax.P("x"), jax.P(None, "x")
    run = jax.shard_map(
        lambda x, w: pallas_kernels.all_gather_matmul(x, w, axis="x", implementation="fused"),
        mesh=mesh,
        in_specs=specs,
        out_specs=jax.P(None, "x"),
        check_vma=False,
    )
    lowered = jax.jit(run).lower(array((8 * 96, 512), specs[0]), array((512, 8 * 256), specs[1]))
    [one] = [r for r in records(aot.compile(lowered)) if r.flops]
    assert one.kind == "product" and one.flops == 2 * 8 * 96 * 512 * 256
