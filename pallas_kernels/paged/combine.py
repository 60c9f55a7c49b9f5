"""Adds up the parts of items that the paged kernel's plan has cut, on Hopper.

A part has left the result of its keys and the base-2 logarithm of their sum. The item's result is
their mean, with the sums as weights (flash-decoding, arXiv 2311.01282 section 3.1). A thread block
is one warpgroup and takes 8 rows of an item at a time, from registers to registers: every number is
read once, and nothing where no item is cut. The order of a sum is that of the parts.

Legend: as plan.py, and E rows of an item, K head width.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret as interpreter
from pallas_kernels.attention.reference import LOWEST
from pallas_kernels.hopper.memory import PIECE, number, share, varying_as
from pallas_kernels.paged.plan import JOB_PARTS, JOB_SLOT, Plan
from pallas_kernels.paged.tile import few_rows
from pallas_kernels.work import Work

OP = "paged_attention_combine"


def combine(
    sums: jax.Array,
    lse: jax.Array,
    work: Plan,
    *,
    rows: int,
    dtype: Any,
    interpret: bool = False,
) -> jax.Array:
    """Returns the results of the plan's jobs, (D E, K) in dtype; later rows hold anything.

    sums, lse: as `hopper.sums` returns them. rows: E.
    """
    jobs, K = work.jobs_D.shape[0], sums.shape[1]
    result = jax.ShapeDtypeStruct((jobs * rows, K), dtype)
    blocks = min(jobs, 2) if interpret else jobs * rows // PIECE
    kernel = plgpu.kernel(
        functools.partial(_body, rows=rows, blocks=blocks),
        out_type=result,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=OP,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
    )
    with Work(OP, 2.0 * sums.size).scope((sums, lse), [result]):
        result_rows = kernel(work.jobs_D, work.count, sums, lse)
    return varying_as(sums, result_rows)


def _body(jobs, count, sums, lse, out, *, rows, blocks):
    K, pieces = sums.shape[1], rows // PIECE
    where = few_rows(K)
    block = lax.axis_index("block")

    @pl.loop(0, share(number(count, 0) * pieces, block, blocks))
    def _(n):
        i = block + n * blocks
        job = lax.div(i, jnp.int32(pieces))
        piece = lax.rem(i, jnp.int32(pieces)) * PIECE
        slot, parts = (number(jobs, job, c) for c in (JOB_SLOT, JOB_PARTS))

        def part(j, carry):
            acc, maximum, total = carry
            part_rows = pl.ds(pl.multiple_of((slot + j) * rows + piece, PIECE), PIECE)
            x = plgpu.load(sums.at[part_rows], layout=where, optimized=False)
            one = lse.at[slot + j, pl.ds(pl.multiple_of(piece, PIECE), PIECE)]
            one = plgpu.load(one, layout=where.reduce(1), optimized=False)
            new = jnp.maximum(maximum, one)
            shrink, weight = jnp.exp2(maximum - new), jnp.exp2(one - new)
            spread = functools.partial(
                lax.broadcast_in_dim, shape=x.shape, broadcast_dimensions=[0]
            )
            return (acc * spread(shrink) + x * spread(weight), new, total * shrink + weight)

        def filled(shape, value, kind):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), kind)

        start = (
            filled((PIECE, K), 0.0, where),
            filled((PIECE,), LOWEST, where.reduce(1)),
            filled((PIECE,), 0.0, where.reduce(1)),
        )
        acc, _, total = lax.fori_loop(0, parts, part, start)
        acc = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        target = out.at[pl.ds(pl.multiple_of(job * rows + piece, PIECE), PIECE)]
        target[...] = acc.astype(out.dtype)
