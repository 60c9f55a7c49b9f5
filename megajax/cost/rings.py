"""Estimates whether matrix products of tensor and expert parallelism are faster as a ring.

A ring overlaps communication: each rank multiplies the piece that it has while it sends that piece
to the next rank. Plain XLA gathers all pieces before the product, or scatters all sums after it.
The functions here return SIMULATED seconds of both, for the forward and the backward pass of one
rank. Because the pieces of a ring are small, their cost model rounds a product up to whole waves of
tiles (cost/roofline.py:in_waves). parallel/overlap.py and parallel/expert_overlap.py decide by
these times.

Legend: R ranks.
"""

import dataclasses
import functools

from megajax.core.hardware import DeviceCard, Link
from megajax.cost.base import ITEMSIZE, CostModel, Op
from megajax.cost.kernels import Matmul, Rowwise
from megajax.cost.roofline import in_waves

# Fixed costs in seconds of one step of a ring and of one collective (chosen; to be measured).
STEP_S, CALL_S = 6e-6, 10e-6


@dataclasses.dataclass(frozen=True)
class Rank:
    """One of R ranks of a node. dtype: of operands and results; float32 is multiplied as tf32."""

    card: DeviceCard
    cores: int
    ranks: int
    dtype: str

    @functools.cached_property
    def model(self) -> CostModel:
        """What is asked for the times of products, passes over memory and transfers."""
        return in_waves(self.cores)

    @property
    def itemsize(self) -> float:
        """Bytes of an element of the operands."""
        return ITEMSIZE[self.dtype]

    def product(self, m: float, k: int, n: int, batch: int = 1) -> float:
        """Returns seconds of a product."""
        dtype = "tfloat32" if self.dtype == "float32" else self.dtype
        op = Op("input", Matmul(m, k, n, batch), dtypes=(dtype,))
        return self.model.op_time(op, self.card)[0]

    def touch(self, arrays: float, rows: float, width: float, dtype: str) -> float:
        """Returns seconds of a pass over memory that reads or writes so many arrays."""
        op = Op("transfer", Rowwise("add", rows, width, arrays - 1), dtypes=(dtype,))
        return self.model.op_time(op, self.card)[0]

    def travel(self, rows: float, width: int, itemsize: float) -> float:
        """Returns seconds in which rows cross the link, without what a call costs."""
        link = Link(self.card.link_bytes_per_s, 0.0)
        return self.model.transfer_time(rows * width * itemsize, link)

    def turn(self, work: float, hop: float, add: float = 0.0) -> float:
        """Returns seconds of a ring: the work of R pieces, each while the next one is sent.

        work: seconds of one piece's product. hop: of sending a piece to the next rank. add: of what
        must follow in each step, such as adding sums.
        """
        return (self.ranks - 1) * (max(hop, work) + add + STEP_S) + work


def gather_matmul(rank: Rank, rows: int, width: int, parts: tuple[int, ...]) -> tuple[float, float]:
    """Returns seconds of (plain XLA, the ring) for products of gathered rows.

    The products that compute the gradients of the weights (dw) are left out of both.
    Args: rows: of all ranks together. parts: columns of each product that shares the gather.
    """
    chunk = rows / rank.ranks
    plain, ring = _gathered(rank, rows, width, parts)
    scattered, as_float32 = (
        rank.travel(rows - chunk, width, size) + CALL_S for size in (rank.itemsize, 4)
    )
    dw = sum(rank.product(width, rows, part) for part in parts)  # dx is scattered beside it
    return plain + max(scattered - dw, 0), ring + max(as_float32 - dw, 0)


def matmul_scatter(
    rank: Rank, rows: int, width: int, parts: tuple[int, ...]
) -> tuple[float, float]:
    """Returns seconds of (plain XLA, the ring) for products whose sums are scattered, without dw.

    parts: rows of each weight. The backward pass gathers dy, as `gather_matmul` gathers x.
    """
    chunk = rows / rank.ranks
    plain, ring = _gathered(rank, rows, width, parts)
    out = sum(rank.product(rows, part, width) for part in parts)
    piece = sum(rank.product(chunk, part, width) for part in parts)
    # Float32 sums travel in a ring, and each is read, added and written.
    add = rank.touch(3, chunk, width, "float32")
    plain += out + rank.travel(rows - chunk, width, rank.itemsize) + CALL_S
    return plain, ring + rank.turn(piece, rank.travel(chunk, width, 4), add)


def _gathered(rank: Rank, rows: int, width: int, parts: tuple[int, ...]) -> tuple[float, float]:
    """A gather before products from `width`: forward of x, or backward of dy."""
    chunk = rows / rank.ranks
    plain = rank.travel(rows - chunk, width, rank.itemsize) + CALL_S
    plain += sum(rank.product(rows, width, part) for part in parts)
    piece = sum(rank.product(chunk, width, part) for part in parts)
    return plain, rank.turn(piece, rank.travel(chunk, width, rank.itemsize))


@dataclasses.dataclass(frozen=True)
class ExpertHalf:
    """One half of an expert layer on one rank: up to the first products, or from the second ones.

    The load of the experts is assumed to be balanced.
    tokens: of a rank, each with `top` experts and `width` elements. experts: of a rank. rows: that
    the tokens of one source rank have at this rank's experts. hidden: columns of each first
    product, or contracted dimension of the second. reached: ranks that plain XLA sends a token to.
    """

    tokens: int
    top: int
    width: int
    experts: int
    hidden: tuple[int, ...]
    rows: int
    reached: int


def expert_dispatch(rank: Rank, half: ExpertHalf) -> tuple[float, float]:
    """Returns seconds of (plain XLA, the ring) for sending tokens and the first products.

    This is the forward pass, and of the backward pass what differs between the two: the sums of the
    tokens' gradients, which are sent while the gradients of the weights are computed.
    """
    plain, ring = _to_experts(rank, half)
    dw = _into(rank, half, rank.ranks)
    plain_sums = _sent(rank, half, half.reached, rank.itemsize)
    ring_sums = _sent(rank, half, rank.ranks - 1, 4)
    return plain + max(plain_sums - dw, 0.0), ring + max(ring_sums - dw, 0.0)


def expert_combine(rank: Rank, half: ExpertHalf) -> tuple[float, float]:
    """Returns seconds of (plain XLA, the ring) for the second products and sending their results.

    The results are sent back to the ranks of their tokens. The backward pass is included, in which
    the gradient of the combined results is sent to the experts.
    """
    plain, ring = _to_experts(rank, half)
    there = _sent(rank, half, half.reached, rank.itemsize) + CALL_S
    out = _out_of(rank, half, rank.ranks)
    back = _expert_turn(rank, half, _out_of(rank, half, 1), half.tokens * half.top, 4)
    return out + there + plain, back + ring


def _to_experts(rank: Rank, half: ExpertHalf) -> tuple[float, float]:
    sent = _sent(rank, half, half.reached, rank.itemsize)
    plain = sent + CALL_S + _into(rank, half, rank.ranks)
    return plain, _expert_turn(rank, half, _into(rank, half, 1), half.rows, rank.itemsize)


def _expert_turn(rank: Rank, half: ExpertHalf, work: float, written: int, itemsize: float) -> float:
    # A source's rows are put among the others', or taken from there: all that it may have.
    each = work + rank.touch(1, half.rows + written, sum(half.hidden), rank.dtype)
    return rank.turn(each, _sent(rank, half, 1, itemsize))


def _sent(rank: Rank, half: ExpertHalf, copies: int, itemsize: float) -> float:
    return rank.travel(copies * half.tokens, half.width, itemsize)


def _into(rank: Rank, half: ExpertHalf, sources: int) -> float:
    """The first products, of the rows of so many sources."""
    rows = -(-half.rows * sources // half.experts)
    return sum(rank.product(rows, half.width, F, half.experts) for F in half.hidden)


def _out_of(rank: Rank, half: ExpertHalf, sources: int) -> float:
    """The second products, of the rows of so many sources."""
    rows = -(-half.rows * sources // half.experts)
    return sum(rank.product(rows, F, half.width, half.experts) for F in half.hidden)
