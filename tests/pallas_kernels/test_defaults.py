"""What each public function launches by default: the table of docs/kernels.md, line by line.

Programs are traced for GPUs that are not here and lowered for CUDA. A kernel is replaced by a
custom call of its name, for its own lowering takes seconds and is tested elsewhere.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import TileSparse, dispatch, tuned
from pallas_kernels.collective import api as collective
from pallas_kernels.expert import api as expert
from tests import tables

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
# A cell -> what the program has of SPECIAL. The weights' gradient beside ragged_dot is a loop.
CELLS = {
    "our kernel": {"mosaic_gpu"},
    "cuDNN": {"cudnn"},
    "`ragged_dot`": {"ragged_dot", "grouped_steps"},
    "XLA, in a loop": {"grouped_steps"},
    "XLA": set(),
    "plain JAX": set(),
}
SPECIAL = ("mosaic_gpu", "cudnn", "ragged_dot", "grouped_steps")
STATES = {
    "none": None,
    "failed": {"correct": False},
    "slower": {"fastest": "reference"},
    "best": {},
}
# Rows that fail are for the first of each kind: which rows count is one function (test_tuned.py).
SEVERAL = ("`fused_gemm`", "`all_gather_matmul`")
COLUMNS = {
    "H100, nothing measured": (tables.H100, ("none", "failed", "slower")),
    "H100, measured right and faster": (tables.H100, ("best",)),
    "A100": (tables.A100, ("best",)),
    "no GPU": (tables.CPU, ("best",)),
}


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def varlen(q, k, v, **options):
    ends = jnp.array([0, 20, 64])
    return pallas_kernels.varlen_attention(q, k, v, cu_seqlens_q=ends, **options)


def packed(q, k, v, **options):
    ids = jnp.repeat(jnp.arange(4), 16)[None]
    return pallas_kernels.packed_attention(q, k, v, segment_ids=ids, causal=True, **options)


def grouped(lhs, rhs):
    return pallas_kernels.grouped_matmul(lhs, rhs, jnp.full(rhs.shape[0], 8))


def quant(x, packed, scales):
    def run(x, scales):
        return pallas_kernels.quant_matmul(x, packed, scales, bits=4, group=64)

    return with_gradients(run)(x, scales)


def norm(x, residual, scale):
    return pallas_kernels.fused_layer_norm(x, residual=residual, scale=scale)


def norm_unpack(x, scale):
    info = pallas_kernels.pack(jnp.zeros((2, 40)), [30, 34], 64)[1]
    return pallas_kernels.norm_unpack(x, info, scale=scale)


def tile_sparse(x, w):
    weight = TileSparse.from_dense(jnp.zeros((64, 64), jnp.bfloat16), np.ones((64, 64), bool))
    return pallas_kernels.tile_sparse_matmul(x, weight.replace(values=weight.values + w[0, 0]))


def quantized(op, *args, **options):
    return functools.partial(getattr(pallas_kernels, op), **options), [*args]


def paged(q, k, v):
    numbers = (jnp.zeros((2, 4), jnp.int32), *(jnp.array(x) for x in ([0, 1], [1, 3], [9, 20])))
    return pallas_kernels.paged_attention(q, k, v, *numbers)


def bytes_of(rows, n):
    return jax.ShapeDtypeStruct((rows, n), jnp.uint8)


THK = [like(64, 2, 64)] * 3
PROGRAMS = {
    "`fused_gemm`": (pallas_kernels.fused_gemm, [like(64, 64), like(64, 64)]),
    "`quant_matmul`": (
        quant,
        [like(64, 64), like(32, 64, dtype=jnp.uint8), like(1, 64, dtype=jnp.float32)],
    ),
    "`grouped_matmul`, few rows": (grouped, [like(64, 64), like(2, 64, 64)]),
    "`grouped_matmul`, many rows": (grouped, [like(4096, 64), like(8, 64, 64)]),
    "`fused_layer_norm`": (norm, [like(64, 512), like(64, 512), like(512)]),
    "`norm_unpack`": (norm_unpack, [like(64, 512), like(512)]),
    "`hadamard_quantize`": quantized("hadamard_quantize", like(8192), rows=2),
    "`reduce_requantize`": quantized("reduce_requantize", bytes_of(2, 4096 + 128), n=4096, rows=2),
    "`reduce_hadamard`": quantized("reduce_hadamard", bytes_of(2, 2048 + 128), n=4096),
    "`subtract_quantize`": quantized(
        "subtract_quantize", like(8192, dtype=jnp.float32), like(8192)
    ),
    "`dequantize_add`": quantized("dequantize_add", bytes_of(2, 4096 + 16), like(16384)),
    "`tile_sparse_matmul`": (tile_sparse, [like(64, 64), like(64, 64)]),
    "`varlen_attention`": (varlen, THK),
    "`packed_attention`": (packed, [like(1, 64, 2, 64)] * 3),
    "attention with a soft cap, slopes or `return_lse`": (
        functools.partial(varlen, softcap=9.0),
        THK,
    ),
    "`paged_attention`": (paged, [like(4, 4, 64), *[like(5, 16, 2, 64)] * 2]),
    "attention in float32": (varlen, [like(64, 2, 64, dtype=jnp.float32)] * 3),
}


def rows_of_page():
    """{operation: {column: cell}} of the table."""
    lines = PAGE.read_text().split("<!-- defaults -->")[1].strip().splitlines()
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in body}


def stub(reference, *args, interpret=False):
    """A custom call in the place of a kernel, of the reference's results."""
    results = jax.eval_shape(reference, *args)
    leaves = [x for x in jax.tree.leaves(args) if x.dtype != jax.dtypes.float0]
    call = jax.ffi.ffi_call("mosaic_gpu", jax.tree.leaves(results), vmap_method="broadcast_all")
    outputs = call(*leaves)
    return jax.tree.unflatten(jax.tree.structure(results), outputs)


@pytest.fixture
def stubbed(monkeypatch):
    real = dispatch.run

    def run(choice, hopper, reference, *args, **options):
        return real(choice, functools.partial(stub, reference), reference, *args, **options)

    monkeypatch.setattr(dispatch, "run", run)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Returns write(asked, changes): rows for what a program asked for; None: no rows."""
    asked, find = {}, tuned.find

    def ask(op, key, *, kind=None):
        asked[op, *key.items()] = op, key
        return find(op, key, kind=kind)

    monkeypatch.setattr(tuned, "find", ask)

    def write(kind, changes):
        rows = [] if changes is None else [tables.row(*each, **changes) for each in asked.values()]
        tables.write(monkeypatch, tmp_path, *rows, kind=kind)

    return write


def launched(function, args, kind):
    """Returns what of SPECIAL the program has."""
    platform = "cpu" if kind == tables.CPU else "cuda"
    with tables.on(kind):
        traced = jax.jit(lambda *args: function(*args)).trace(*args)
        text = traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)
    return {word for word in SPECIAL if word in text}


def with_gradients(function):
    """Both passes. Attention's backward pass follows the same rule and takes long to lower."""

    def both(*args):
        y, pull = jax.vjp(function, *args)
        return y, pull(jax.tree.map(jnp.ones_like, y))

    return both


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_function_launches_what_the_page_says(name, stubbed, measured):
    page, (function, args) = rows_of_page()[name], PROGRAMS[name]
    assert [*page] == [*COLUMNS]
    alone = ("attention", "quantize", "reduce_hadamard", "quant_")  # none, long to lower, made
    function = function if any(word in name for word in alone) else with_gradients(function)
    jax.eval_shape(function, *args)  # asks for its rows
    for column, (kind, states) in COLUMNS.items():
        for state in states if name in SEVERAL else states[:1]:
            measured(kind, STATES[state])
            assert launched(function, args, kind) == CELLS[page[column]], (column, state)


COLLECTIVES = {
    "`all_gather_matmul`": (
        lambda x: collective.all_gather_matmul(x, x.T, axis="x"),
        "fused_gather",
    ),
    "`matmul_reduce_scatter`": (
        lambda x: collective.matmul_reduce_scatter(x, jnp.tile(x.T, 2), axis="x"),
        "fused_scatter",
    ),
    "`matmul_all_reduce`": (
        lambda x: collective.matmul_all_reduce(x, jnp.tile(x.T, 2), axis="x"),
        "fused_reduce",
    ),
}
HALVES = {
    "`dispatch_grouped_matmul`": "fused_dispatch",
    "`grouped_matmul_combine`": "fused_combine",
}


def halves(x):
    """Both halves of an expert layer."""
    routes = expert.route(jnp.zeros((64, 1), jnp.int32), experts=1, axis="x")
    h = expert.dispatch_grouped_matmul(x, x[None, :, :], routes, axis="x")
    w = jnp.tile(x, 2)[None]
    return expert.grouped_matmul_combine(h, w, routes, jnp.ones((64, 1)), axis="x")


def test_the_page_has_every_program():
    assert set(rows_of_page()) == {*PROGRAMS, *COLLECTIVES, *HALVES}


class Fused(Exception):
    """In the place of a fused kernel."""


@pytest.mark.parametrize("name", [*COLLECTIVES, *HALVES])
def test_fused_products_launch_what_the_page_says(name, measured, monkeypatch):
    """On a mesh of the axis alone; nothing but rows of a real link makes them the default."""
    page = rows_of_page()[name]
    function, kernel = COLLECTIVES.get(name) or (halves, HALVES[name])

    def raises(*args, **options):
        raise Fused(kernel)

    def runs(kind, **others):
        mesh = tables.mesh(kind, **others, x=8)
        run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        with jax.sharding.use_abstract_mesh(mesh), monkeypatch.context() as patch:
            patch.setattr(collective if name in COLLECTIVES else expert, kernel, raises)
            try:
                jax.eval_shape(run, like(64, 64))
            except Fused as error:
                return error.args[0] == kernel and "our kernel"
        return "XLA"

    best = {"fastest": "fused", "link": "real"}
    runs(tables.H100)  # asks for its rows
    for column, (kind, states) in COLUMNS.items():
        for state in states if name in SEVERAL else states[:1]:
            changes = STATES[state]
            measured(kind, None if changes is None else best | changes)
            cell = "XLA" if page[column] == "plain JAX" else page[column]
            assert runs(kind) == cell, (column, state)
    measured(tables.H100, best | {"link": "emulated"})
    assert runs(tables.H100) == "XLA"
    measured(tables.H100, best)
    assert runs(tables.H100, other=1) == "our kernel"
    assert runs(tables.H100, other=2) == "XLA"


def test_no_table_is_committed_that_nobody_reviewed():
    """The page says so; whoever commits the first table says on the page what changed."""
    words = "No tuning table is committed"
    assert (words in re.sub(r"\s+", " ", PAGE.read_text())) != (
        tuned.FOLDER.exists() and any(tuned.FOLDER.glob("*.json"))
    )
