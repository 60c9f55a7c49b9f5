"""The compiled H100 program of the exchange: one collective a level, and no byte uncounted.

Two nodes of four GPUs; the figures are SDP4Bit's (arXiv 2410.15526): 4.0156 bits a weight, 8.25
and 4.25 bits a gradient inside a node and between nodes.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from megajax.core.mesh import make_mesh
from megajax.cost.hlo import collectives
from megajax.parallel import zero
from megajax.quant import codec
from megajax.systems.aot import QUICK
from pallas_kernels import aot

pytestmark = pytest.mark.aot

NODES, RANKS, MIB = 2, 4, 2**20
RANK = P(("node", "data"))


def compile_text(n, name="sdp4bit"):
    """Returns (the program of one exchange of n elements, its mesh)."""
    used = codec(name)
    mesh = make_mesh(aot.devices(NODES, RANKS), {"node": NODES, "data": RANKS})
    length = zero.piece_length(n, NODES * RANKS)

    def step(x, main, copy, seed):
        piece = zero.reduce_scatter(x[0], used, key=jax.random.key(seed))
        main = main[0] - piece
        return main[None], zero.gather_difference(main, copy, used)

    def argument(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        run = jax.shard_map(
            step, mesh=mesh, in_specs=(RANK, RANK, P(), P()), out_specs=(RANK, P()), check_vma=False
        )
        lowered = jax.jit(run).lower(
            argument((NODES * RANKS, n), RANK),
            argument((NODES * RANKS, length), RANK),
            argument((n,), P()),
            argument((), P(), jnp.int32),
        )
    return aot.compile(lowered, QUICK).as_text(), mesh


@pytest.mark.parametrize("n", [2**22, 5_000_011])
def test_bytes(n):
    text, mesh = compile_text(n)
    sent = collectives(text, dict(mesh.shape))
    assert all(c.arrays == 1 and not c.loops for c in sent)
    by_level = {(c.kind, c.axes): c.nbytes for c in sent}
    assert len(by_level) == len(sent) == 4
    inside = by_level["all-to-all", ("data",)]
    between = by_level["all-to-all", ("node",)]
    weights = by_level["all-gather", ("node", "data")]
    assert by_level["all-reduce", ("node", "data")] <= 4  # the flag of what is not finite
    assert zero.wire_bytes(n, codec("sdp4bit"), NODES, RANKS) == {
        "inside": inside,
        "between": between,
        "weights": weights,
    }
    # By hand: codes, and a float32 scale for 128 gradients or 2048 weights.
    for bytes_, elements, bits in (
        (inside, n, 8 + 32 / 128),
        (between, n / RANKS, 4 + 32 / 128),
        (weights, n, 4 + 32 / 2048),
    ):
        assert 8 * bytes_ / elements == pytest.approx(bits, rel=0 if n == 2**22 else 0.005)
    assert between <= 0.27 * 2 * n / RANKS  # of what bfloat16 would send
    assert not float_collectives(text)


def float_collectives(text):
    """Lines of collectives that carry more than 1 MiB of floating numbers."""
    lines = re.findall(r"= (.*?) (?:all|reduce|collective)[a-z-]+(?:-start)?\(", text)
    sizes = [
        (kind, math.prod(int(d) for d in shape.split(",") if d))
        for line in lines
        for kind, shape in re.findall(r"\b(bf16|f\d+)\[([\d,]*)\]", line)
    ]
    return [(kind, size) for kind, size in sizes if size * int(kind.lstrip("bf")) / 8 > MIB]


def test_floats_would_be_seen():
    """The reading finds what it looks for: a sum in float32 by XLA's own collective."""
    mesh = make_mesh(aot.devices(NODES, RANKS), {"node": NODES, "data": RANKS})
    x = jax.ShapeDtypeStruct((8, MIB), jnp.float32, sharding=jax.NamedSharding(mesh, RANK))
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            lambda y: jax.lax.psum(y, ("node", "data")), mesh=mesh, in_specs=RANK, out_specs=P()
        )
        text = aot.compile(jax.jit(run).lower(x), QUICK).as_text()
    assert float_collectives(text)
