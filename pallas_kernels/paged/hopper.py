"""The paged kernel for Hopper: decoding and pieces of prompts, in one batch, on the engine.

A tile of rows is Q tokens of one segment with the R query heads of one key-value head, token by
token: 64 rows a compute warpgroup, one of which is live in 64 / R where a sequence decodes. Keys
come in steps of C, which lie on the grid of absolute positions; a step is as many pages as it
holds, each a copy of its own through the page table, or a part of a larger page. The plan
(plan.py) gives every thread block the same number of steps:

    producer      for its parts: wait free[s] | TMA k, v of each page -> ready[s]; pages that no row
                  sees are not read, the producer arrives in their place
    each compute  for its parts: TMA q | for the part's steps: wait ready[s], S = Q K^T,
                  mask, softmax in base 2, O += P V, arrive free[s]
                  | store O / l, or of an item that is cut O / l and m + log2 l in a slot

    ready[s]      2 C / N copies (and 2 of scales)  producer -> both
    free[s]       a warpgroup each                  both -> producer
    q_ready[w]    1 copy                            of a warpgroup's own rows
    both          a warpgroup each                  what one stores to shared memory both multiply

Steps that need a mask come first in a part, so that there are two loops. In the first, V has rows
that no query sees. They may hold NaN, and 0 NaN is NaN, so they are set to 0 in the ring. Pages of
8 bits are converted from the ring into tiles of q's type, the keys by one warpgroup and the values
by the other where there are two; the scales of keys multiply the logits, those of values the
weights.

Legend: as plan.py, and T tokens, B segments, P pages, N tokens of a page, H query heads,
R = H / G, K head width, Q tokens of a tile, E rows of it that are copied, M pages of a table's row.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import LOWEST, Spec
from pallas_kernels.hopper import engine
from pallas_kernels.hopper.cards import ROWS
from pallas_kernels.hopper.epilogue import WGMMA, Staging
from pallas_kernels.hopper.logits import by_row, logits, product, row_vector, staging
from pallas_kernels.hopper.memory import PIECE, SWIZZLE, number, share, swizzled, varying_as
from pallas_kernels.paged.plan import (
    BEGINS,
    FIRST,
    ITEM,
    LEFT,
    LIVE,
    POSITION,
    RIGHT,
    SEGMENT,
    SLOT,
    STEPS,
    Plan,
    most_slots,
)
from pallas_kernels.paged.reference import Pages
from pallas_kernels.paged.tile import (
    OP,
    PART,
    Shape,
    Tile,
    buffers,
    check,
    engine_tile,
    few_rows,
)
from pallas_kernels.work import Work, attention, nbytes

UPCAST = plgpu.Layout.WGMMA_UPCAST_2X


def sums(
    q_rows: jax.Array,
    pages: Pages,
    sinks_GE: jax.Array | None,
    work: Plan,
    *,
    shape: Shape,
    tile: Tile,
    spec: Spec,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the plan.

    q_rows: (I E, K). sinks_GE: float32 (G, 64 x warpgroups), base 2, or None.
    Returns: (results of items that are not cut (I E, K), in q's type; of each slot, float32, the
      result of its keys (slots E, K) and the logarithm of their sum (slots, 64 x warpgroups), base
      2). What no part stores holds anything.
    """
    check(tile, shape)
    blocks = work.first_D.shape[0] - 1
    E, W, (pieces, _) = shape.rows(tile), shape.warpgroups(tile), shape.pieces(tile)
    slots = most_slots(blocks)
    of, shared = engine_tile(tile, shape), buffers(tile, shape)
    shared.pop("reductions")
    scratch: dict[str, Any] = {name: _scratch(name, *size) for name, size in shared.items()}
    scratch["p_smem"] = staging((W, ROWS, tile.keys), shape.dtype, interpret)  # see multiply_into
    scratch["q_ready"] = plgpu.Barrier(num_barriers=W)
    scratch["both"] = plgpu.Barrier(num_arrivals=W)
    arrivals = 2 * pieces + 2 * shape.small
    results = engine.launch(
        functools.partial(_body, shape=shape, tile=tile, spec=spec, interpret=interpret),
        {
            "parts": work.parts_V,
            "first": work.first_D,
            "table": _whole_steps(pages.table_BM, tile.keys, shape.page),
            "q": q_rows,
            "k": pages.k,
            "v": pages.v,
            "k_scale": _by_position(pages.k_scale, pages.table_BM, tile.keys),
            "v_scale": _by_position(pages.v_scale, pages.table_BM, tile.keys),
            "sinks": sinks_GE,
        },
        {
            "out": jax.ShapeDtypeStruct(q_rows.shape, q_rows.dtype),
            "sums": jax.ShapeDtypeStruct((slots * E, shape.width), jnp.float32),
            "lse": jax.ShapeDtypeStruct((slots, W * ROWS), jnp.float32),
        },
        scratch | engine.barriers(of, arrivals),
        work=_work(q_rows, pages, shape, spec),
        tile=of,
        clusters=blocks,
        interpret=interpret,
    )
    return varying_as(q_rows, (results["out"], results["sums"], results["lse"]))


def _work(q_rows: jax.Array, pages: Pages, shape: Shape, spec: Spec) -> Work:
    """Returns the work of a call whose tables are full and whose items have a query in each row.

    spec.pairs: how many pairs of a token and a position there are, if the caller knows the tokens.
    """
    (B, M), N = pages.table_BM.shape, shape.page
    heads, positions = shape.heads * shape.group, M * N
    queries = q_rows.shape[0] // heads
    pairs = queries * positions if spec.pairs is None else spec.pairs
    page_bytes = 2 * nbytes([pages.k]) * min(1.0, B * M / pages.k.shape[0])
    return dataclasses.replace(
        attention(OP, pairs, heads, (queries, positions, shape.width), 2),
        read=page_bytes + nbytes([q_rows, pages.table_BM]),
    )


def _scratch(name: str, size: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory; pages of 8 bits lie in pieces that warpgroups share."""
    if name.endswith(("lse_smem", "scale_smem")) or name == "p_smem":
        return plgpu.SMEM(size, dtype)
    return swizzled(size, dtype, PART if jnp.dtype(dtype).itemsize == 1 else SWIZZLE)


def _whole_steps(table_BM: jax.Array, keys: int, page: int) -> jax.Array:
    """The table with room for whole steps; what is added is never read."""
    return jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % max(keys // page, 1))))


def _by_position(scale_PNG: jax.Array | None, table_BM: jax.Array, keys: int) -> jax.Array | None:
    """Returns scales of each sequence's positions (B, G, M N), in whole steps.

    TMA cannot copy columns of pages.

    It is 2 x 4 bytes moved for K bytes of a page, of all places that tables have.
    """
    if scale_PNG is None:
        return None
    (_, N, G), (B, M) = scale_PNG.shape, table_BM.shape
    scales = jnp.take(scale_PNG, table_BM, axis=0, mode="clip").reshape(B, M * N, G).swapaxes(1, 2)
    return jnp.pad(scales, ((0, 0), (0, 0), (0, -M * N % keys)))


def multiply_into(acc, left, right_smem, staging_smem, interpret: bool):
    """acc + left right, left in registers; the interpreter's goes through shared memory."""
    if interpret:
        staging_smem[...] = left
        plgpu.commit_smem()

        def run(acc_ref):
            plgpu.wgmma(acc_ref, staging_smem, right_smem)
            return acc_ref[...]

        return acc + pl.run_scoped(run, plgpu.ACC(acc.shape, jnp.float32))
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right_smem))(plgpu.ACC.init(acc))


class Place(NamedTuple):
    """The numbers of a part. masked: how many of its steps need a mask; they come first."""

    item: Any
    segment: Any
    first: Any
    steps: Any
    right: Any
    masked: Any
    position: Any
    live: Any


@dataclasses.dataclass(frozen=True)
class _Block:
    """The arrays, shared memory and sizes that both roles of a thread block use."""

    gmem: dict[str, Any]
    smem: dict[str, Any]
    shape: Shape
    tile: Tile

    def of(self, v, column):
        """Returns a column of part v in the plan."""
        return number(self.gmem["parts"], v, column)

    def place(self, v) -> Place:
        """Returns the numbers of part v."""
        columns = (ITEM, SEGMENT, FIRST, STEPS, RIGHT, LEFT, POSITION, LIVE)
        place = Place(*(self.of(v, c) for c in columns))
        return place._replace(masked=place.right + place.masked)

    def head(self, item):
        """Returns the key-value head of an item."""
        return lax.rem(item, jnp.int32(self.shape.heads))

    def step(self, place, s):
        """Returns the s-th step that a part takes: at the right end, the left end, then between."""
        turned = jnp.where(s < place.right, place.steps, 0)
        return place.first + s - place.right + turned

    def seen(self, place):
        """Returns (low, high): some row sees each key low <= key < high."""
        low = 0 if self.shape.left is None else jnp.maximum(place.position - self.shape.left, 0)
        return low, place.position + place.live

    def load(self, place, s, buffer, barrier):
        """The producer: starts the copies of a step, each of a page or less."""
        step, (pieces, size) = self.step(place, s), self.shape.pieces(self.tile)
        head, (low, high) = self.head(place.item), self.seen(place)
        C, N = self.tile.keys, self.shape.page
        if self.shape.small:
            span = place.segment, head, pl.ds(pl.multiple_of(step * C, C), C)
            for x in "kv":
                target = self.smem[f"{x}_scale_smem"].at[buffer]
                plgpu.copy_gmem_to_smem(self.gmem[f"{x}_scale"].at[span], target, barrier)

        @pl.loop(0, pieces)
        def _(j):
            key = step * C + j * size
            some = (key + size > low) & (key < high)
            part = pl.ds(pl.multiple_of(j * size, size), size)

            @pl.when(some)
            def _():
                page = number(self.gmem["table"], place.segment, lax.div(key, jnp.int32(N)))
                row = 0 if size == N else pl.multiple_of(lax.rem(key, jnp.int32(N)), size)
                for x in "kv":
                    source = self.gmem[x].at[page, pl.ds(row, size), head]
                    plgpu.copy_gmem_to_smem(
                        source, self.smem[f"{x}_smem"].at[buffer, part], barrier
                    )

            @pl.when(jnp.logical_not(some))
            def _():
                for _ in "kv":
                    plgpu.barrier_arrive(barrier)


@dataclasses.dataclass(frozen=True)
class _Warpgroup:
    """A compute warpgroup and its number. begun: the steps of the parts before this one."""

    block: _Block
    ready: Any
    free: Any
    q_ready: Any
    both: Any
    spec: Spec
    interpret: bool
    number: Any

    @property
    def several(self) -> bool:
        """Whether two warpgroups compute."""
        return self.block.shape.warpgroups(self.block.tile) > 1

    def meet(self):
        """Waits until both warpgroups are here."""
        if self.several:
            plgpu.barrier_arrive(self.both)
            plgpu.barrier_wait(self.both)

    def publish(self):
        """Makes stores to shared memory visible to the products of both warpgroups."""
        plgpu.commit_smem()
        self.meet()

    def convert(self, name, buffer, step, live):
        """Converts 8-bit pages to a tile of q's type. live: keys that are not set to 0, or None."""
        smem, dtype, C = self.block.smem, self.block.shape.dtype, self.block.tile.keys
        source, target = smem[f"{name}_smem"].at[buffer], smem[f"wide_{name}_smem"]

        # One piece after the other: side by side they take too many registers.
        @pl.loop(0, C // ROWS * (self.block.shape.width // PART))
        def _(i):
            row = pl.multiple_of(lax.rem(i, jnp.int32(C // ROWS)) * ROWS, ROWS)
            column = pl.multiple_of(lax.div(i, jnp.int32(C // ROWS)) * PART, PART)
            piece = pl.ds(row, ROWS), pl.ds(column, PART)
            x = widened(plgpu.load(source.at[piece], layout=UPCAST, optimized=False), dtype)
            target[piece] = x if live is None else kept_rows(x, step * C + row, live, UPCAST)

    def erase(self, buffer, first, live):
        """Sets values that no row sees to 0 in the ring. first: the tile's first key."""
        values = self.block.smem["v_smem"].at[buffer]
        C, K = values.shape
        width = min(K & -K, PART)
        where = few_rows(width)
        low, high = (jnp.clip(x - first, 0, C) for x in live)

        def one(i, _):
            row = pl.multiple_of(i * PIECE, PIECE)
            for c in range(0, K, width):
                part = values.at[pl.ds(row, PIECE), pl.ds(c, width)]
                x = plgpu.load(part, layout=where, optimized=False)
                part[...] = kept_rows(x, first + row, live, where)

        @pl.when(self.number == 0)
        def _():
            lax.fori_loop(0, lax.div(low + PIECE - 1, jnp.int32(PIECE)), one, None)
            lax.fori_loop(lax.div(high, jnp.int32(PIECE)), C // PIECE, one, None)

    def operands(self, place, buffer, step, masked):
        """Returns the tiles of keys and values to multiply; values that no row sees are 0."""
        smem, seen = self.block.smem, self.block.seen(place)
        if self.block.shape.small:
            self.meet()  # the other multiplies what was converted no more
            for n, (x, live) in enumerate((("k", None), ("v", seen if masked else None))):
                if self.several:  # one has the keys, the other the values
                    when_assigned = pl.when(self.number == n)
                    when_assigned(functools.partial(self.convert, x, buffer, step, live))
                else:
                    self.convert(x, buffer, step, live)
            self.publish()
            return smem["wide_k_smem"], smem["wide_v_smem"]
        if masked:
            self.erase(buffer, step * self.block.tile.keys, seen)
            self.publish()
        return smem["k_smem"].at[buffer], smem["v_smem"].at[buffer]

    def step(self, s, carry, place, begun, rows, masked):
        """Computes a step: logits, softmax, sums. rows: (q, their tokens, staging)."""
        acc, maximum, total = carry
        tile, (own_q, token, p_smem) = self.block.tile, rows
        buffer, step = lax.rem(begun + s, jnp.int32(tile.stages)), self.block.step(place, s)
        shape = (ROWS, tile.keys)
        plgpu.barrier_wait(self.ready.at[buffer])
        keys, values = self.operands(place, buffer, step, masked)
        x = product([own_q], [keys], shape)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + step * tile.keys
        if self.block.shape.small:
            x *= self.scales("k", buffer, shape)
        x, _ = logits(x, key, None, None, self.spec.scale, self.spec.softcap)
        if masked:
            back = by_row(token, shape) - (key - place.position)  # a token's own key is 0
            inside = (
                back if self.block.shape.left is None else back | (self.block.shape.left - back)
            )
            x = jnp.where(inside >= 0, x, -jnp.inf)
        new = jnp.maximum(maximum, x.max(axis=1))
        shrink, p = jnp.exp2(maximum - new), jnp.exp2(x - by_row(new, shape))
        total = total * shrink + p.sum(axis=1)
        acc *= by_row(shrink, acc.shape)
        if self.block.shape.small:
            scale = self.scales("v", buffer, shape)
            if masked:  # NaN in scales of nobody
                low, high = self.block.seen(place)
                scale = jnp.where((key >= low) & (key < high), scale, 0.0)
            p *= scale
        p = p.astype(own_q.dtype)
        if not self.interpret:  # the weights in float32 need no registers any more
            acc, total, new, p = lax.optimization_barrier((acc, total, new, p))
        acc = multiply_into(acc, p, values, p_smem, self.interpret)
        plgpu.barrier_arrive(self.free.at[buffer])
        return acc, new, total

    def scales(self, name, buffer, shape):
        """Returns the scales of a step's keys or values, the same in all rows."""
        ref = self.block.smem[f"{name}_scale_smem"].at[buffer]
        part = plgpu.load(ref, layout=WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(part, shape, [1])

    def skip(self, s, _, place, begun):
        """Passes a step that has no rows of this warpgroup, which is the second one."""
        buffer = lax.rem(begun + s, jnp.int32(self.block.tile.stages))
        plgpu.barrier_wait(self.ready.at[buffer])
        if self.block.shape.small:
            self.operands(place, buffer, self.block.step(place, s), True)
        else:
            pl.when(s < place.masked)(self.meet)
        plgpu.barrier_arrive(self.free.at[buffer])

    def rows(self, v):
        """Returns where this warpgroup's rows of part v's item are in memory."""
        E = self.block.shape.rows(self.block.tile)
        first = pl.multiple_of(self.block.of(v, ITEM) * E + self.number * ROWS, PIECE)
        return pl.ds(first, min(E, ROWS))

    def part(self, v, place, begun):
        """Computes all steps of part v and stores their sums."""
        block, shape, tile = self.block, self.block.shape, self.block.tile
        w, R = self.number, shape.group
        own_q, p_smem = block.smem["q_smem"].at[w], block.smem["p_smem"].at[w]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the results before
        live_q = own_q.at[pl.ds(0, min(shape.rows(tile), ROWS))]
        plgpu.copy_gmem_to_smem(block.gmem["q"].at[self.rows(v)], live_q, self.q_ready.at[w])

        token = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1)) + w * ROWS
        token = token if R == 1 else lax.div(token, jnp.full_like(token, R))
        token = jnp.minimum(token, place.live - 1)  # rows of nobody see what the last one sees
        carry = self.start(v)
        plgpu.barrier_wait(self.q_ready.at[w])
        about = {"place": place, "begun": begun}
        step = functools.partial(self.step, rows=(own_q, token, p_smem), **about)
        masked, steps = place.masked, place.steps
        if self.several:
            live = place.live * R > w * ROWS
            masked, steps = (jnp.where(live, n, 0) for n in (masked, steps))
        carry = lax.fori_loop(0, masked, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(masked, steps, functools.partial(step, masked=False), carry)
        if self.several:
            lax.fori_loop(steps, place.steps, functools.partial(self.skip, **about), None)
        self.finish(v, own_q, live_q, *carry)

    def start(self, v):
        """Returns the sums before any key; a sink is a key with a logit of its own and no value."""

        def filled(value):
            return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), WGMMA.reduce(1))

        K = self.block.shape.width
        acc = plgpu.layout_cast(jnp.zeros((ROWS, K), jnp.float32), WGMMA)
        if "sinks" not in self.block.gmem:
            return acc, filled(LOWEST), filled(0.0)
        begins = self.block.of(v, BEGINS).astype(jnp.float32)
        head = self.block.head(self.block.of(v, ITEM))
        sink = row_vector(self.block.gmem["sinks"].at[head], self.number * ROWS)
        return acc, sink * begins + LOWEST * (1 - begins), filled(begins)

    def finish(self, v, own_q, live_q, acc, maximum, total):
        """Stores a part's result, or that of an item that is cut in its slot."""
        some = total > 0
        total = jnp.where(some, total, 1.0)
        acc /= by_row(total, acc.shape)
        gmem, smem, w = self.block.gmem, self.block.smem, self.number
        slot = self.block.of(v, SLOT)

        @pl.when(slot < 0)
        def _():
            own_q[...] = acc.astype(own_q.dtype)  # all reads of q are over
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(live_q, gmem["out"].at[self.rows(v)])

        @pl.when(slot >= 0)
        def _():
            smem["lse_smem"][w] = jnp.where(some, maximum + jnp.log2(total), -jnp.inf)
            staging, height = Staging((smem["sums_smem"],), w), live_q.shape[0]
            row = slot * self.block.shape.rows(self.block.tile) + w * ROWS
            for p, (_, c, down, across) in enumerate(staging.pieces(acc.shape)):

                def copy(piece, c=c):
                    rows = pl.ds(pl.multiple_of(row, PIECE), height), pl.ds(c, piece.shape[1])
                    plgpu.copy_smem_to_gmem(piece.at[pl.ds(0, height)], gmem["sums"].at[rows])

                staging.put(p, (acc[down, across],), copy)
            target = gmem["lse"].at[slot, pl.ds(pl.multiple_of(w * ROWS, ROWS), ROWS)]
            plgpu.copy_smem_to_gmem(smem["lse_smem"].at[w], target)


def widened(x, dtype):
    """Returns numbers of 8 bits as numbers of 16, which hold all of them."""
    if x.dtype == jnp.int8:
        return x.astype(dtype)
    x = x.astype(jnp.float16)
    return x if dtype == jnp.float16 else x.astype(jnp.float32).astype(dtype)


def kept_rows(x, first, live, layout):
    """Returns x with 0 in the rows that are not live; row 0 is key `first`."""
    key = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) + first
    return jnp.where((key >= live[0]) & (key < live[1]), x, jnp.zeros((), x.dtype))


def _body(gmem, *, shape, tile, spec, interpret, ready, free, q_ready, both, **smem):
    thread_block = lax.axis_index("block")
    first, last = (number(gmem["first"], thread_block + d) for d in range(2))
    of = engine_tile(tile, shape)
    roles = engine.Product(of, ready, free, lambda place: place.steps, first, 1)
    block = _Block(gmem, smem, shape, tile)

    def compute():
        do = _Warpgroup(block, ready, free, q_ready, both, spec, interpret, roles.warpgroup)

        @pl.loop(0, share(last, first, 1), init_carry=jnp.int32(0))
        def _(n, begun):
            place = block.place(first + n)
            do.part(first + n, place, begun)
            return begun + place.steps

        plgpu.wait_smem_to_gmem(0)

    roles.specialise(compute, lambda: roles.produce(last, block.place, block.load))
