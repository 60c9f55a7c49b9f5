"""Bytes that an exchange of data parallelism sends, read from the program compiled for H100s.

Two nodes of four GPUs, one exchange of gradients and weights (parallel/zero.py) for each codec. No
GPU is needed: the compiler of the extra `aot` gives the scheduled program, whose collectives name
their ranks and bytes (cost/hlo.py). Source of the figures beside: SDP4Bit (arXiv 2410.15526): codes
of 4 and 8 bits, with a float32 scale for 2048 weights or 128 gradients.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.mesh import make_mesh
from megajax.cost.hlo import Collective, collectives
from megajax.parallel import zero
from megajax.quant import codec
from megajax.systems.aot import QUICK
from pallas_kernels import aot

NODES, RANKS = 2, 4
ELEMENTS = 2**22  # of the buffer: whole groups on every rank, so bits are those of the rule
CODECS = ("bf16", "fp8", "zeropp", "sdp4bit")
BF16_BITS = 16
# Level -> (collective, mesh axes that it spans, the part of the buffer that goes through it).
LEVELS = {
    "weights": ("all-gather", ("node", "data"), 1),
    "inside": ("all-to-all", ("data",), 1),
    "between": ("all-to-all", ("node",), RANKS),
}


def compiled(name: str, n: int = ELEMENTS) -> list[Collective]:
    """Returns the collectives of one exchange of n elements in a codec.

    Raises: UserError where the extra `aot` is not installed.
    """
    used, everywhere = codec(name), P(("node", "data"))
    try:
        devices = aot.devices(NODES, RANKS)
    except NotImplementedError as error:
        raise UserError(f"--bytes: {error}; or leave --bytes out") from None
    mesh = make_mesh(devices, {"node": NODES, "data": RANKS})
    length = zero.piece_length(n, NODES * RANKS)

    def step(x: Any, main: Any, copy: Any, seed: Any) -> tuple:
        piece = zero.reduce_scatter(x[0], used, key=jax.random.key(seed))
        main = main[0] - piece
        return main[None], zero.gather_difference(main, copy, used)

    def argument(shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        run = jax.shard_map(
            step, mesh=mesh, in_specs=(everywhere, everywhere, P(), P()),
            out_specs=(everywhere, P()), check_vma=False,
        )  # fmt: skip
        lowered = jax.jit(run).lower(
            argument((NODES * RANKS, n), everywhere),
            argument((NODES * RANKS, length), everywhere),
            argument((n,), P()), argument((), P(), jnp.int32),
        )  # fmt: skip
    return collectives(aot.compile(lowered, QUICK).as_text(), dict(mesh.shape))


def count(name: str, found: list[Collective], n: int = ELEMENTS) -> Iterator[dict[str, Any]]:
    """Yields a row for each level of a codec's program, and for what crosses between nodes.

    bits: of an element that goes through the level. of_bf16: bytes over those that bfloat16 alone
    would need. `crossing`: bytes of one rank that leave its node: of the gradients its rows for the
    other nodes, of the weights its piece, once for each rank of them. Raises: UserError for a
    program without exactly one collective a level: its bytes would be others.
    """
    sent: dict[str, int] = {}
    for level, (kind, axes, part) in LEVELS.items():
        mine = [c for c in found if (c.kind, c.axes) == (kind, axes)]
        if len(mine) != 1:
            raise UserError(f"{name}: {len(mine)} collectives {kind} over {axes}, not one")
        sent[level] = mine[0].nbytes
        bits = 8 * sent[level] * part / n
        yield _row(name, level, sent[level], bits, bits / BF16_BITS, n)
    away = NODES - 1
    crossing = away * sent["between"] // NODES + away * sent["weights"] // NODES
    plain = away * BF16_BITS * n // 8 // RANKS // NODES + away * BF16_BITS * n // 8 // NODES
    yield _row(name, "crossing", crossing, 8 * crossing / n, crossing / plain, n)


def _row(
    name: str, level: str, nbytes: int, bits: float, of_bf16: float, elements: int
) -> dict[str, Any]:
    return {
        "part": "bytes", "codec": name, "level": level, "bytes": nbytes, "bits": bits,
        "of_bf16": of_bf16, "elements": elements, "nodes": NODES, "ranks": RANKS,
    }  # fmt: skip


def rows() -> Iterator[dict[str, Any]]:
    """Yields the rows of all codecs."""
    for name in CODECS:
        yield from count(name, compiled(name))
