"""What tune.py times of the fused products: the papers' layers, on one rank beside ghosts.

The rival is plain XLA, one after the other (`Case.serial` of collective/bench.py). A model's own
sums travel in 16 bits, so the rival's do, where the kernels send float32: a table that says 'fused'
does not flatter.
"""

from collections.abc import Callable, Iterator

import jax

from pallas_kernels import tuned
from pallas_kernels.collective import api
from pallas_kernels.collective.api import GATHER, REDUCE, SCATTER
from pallas_kernels.collective.bench import Case, link
from pallas_kernels.collective.cases import DENSE
from pallas_kernels.hopper.fused import Fusion

ROWS = (1024, 2048, 4096, 8192)  # m (chosen: smaller products have nothing to hide behind)
DECODING = (8, 16, 32, 64, 128)  # m of the all-reduce
WORDS = ("fused", "xla")


def cases() -> Iterator[Case]:
    """The papers' feed-forward layers, every number of rows."""
    for model in DENSE.values():
        for m in ROWS:
            up, down = model.up(m), model.down(m, 4)
            yield Case(GATHER, m, up.k, up.n)
            yield Case(SCATTER, m, down.k, down.n)
        for m in DECODING:
            down = model.down(m, 4)
            yield Case(REDUCE, m, down.k, down.n)


def tunings() -> tuple[tuned.Tuning, ...]:
    """Returns the tunings of all cases."""
    return tuple(map(tuning, cases()))


def tuning(case: Case) -> tuned.Tuning:
    """One measurement."""
    legal = case.fusions()

    def function(fusion: Fusion, interpret: bool) -> Callable[..., jax.Array]:
        if interpret:
            return lambda x, w: case.alike(fusion, x, w)
        return lambda x, w: case.fused(case.ghost(fusion, link()), fusion, x, w)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return case.serial(case.alone(legal[0], link()), legal[0], x, w, wire="bfloat16")

    key = api.key(case.op, case.ranks, case.rows, case.K, case.N)
    return tuned.Tuning(
        case.op, key, legal, function, case.inputs, plain, want=case.exact, words=WORDS,
        link="emulated",
    )  # fmt: skip
