"""What tune.py times of the experts' products: the papers' models, on one rank beside ghosts.

The rival is plain XLA, one after the other (`Case.plain` of expert/bench.py).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels import tuned
from pallas_kernels.collective.bench import link
from pallas_kernels.expert import fusions
from pallas_kernels.expert.bench import Case, of_model
from pallas_kernels.expert.cases import MIXTURES
from pallas_kernels.expert.fusions import COMBINE, DISPATCH
from pallas_kernels.expert.product import ExpertFusion

TOKENS = (4096, 16384)  # of all ranks (COMET, section 5: 2048 to 32768)
WORDS = ("fused", "xla")


def cases() -> Iterator[Case]:
    """The papers' models, every number of tokens, rows for any routing."""
    for model in MIXTURES:
        for tokens in TOKENS:
            for op in (DISPATCH, COMBINE):
                yield of_model(op, model, tokens)


def tunings() -> tuple[tuned.Tuning, ...]:
    """Returns the tunings of all cases."""
    return tuple(map(tuning, cases()))


def tuning(case: Case) -> tuned.Tuning:
    """One measurement."""
    legal = case.fusions()

    def function(fusion: ExpertFusion, interpret: bool) -> Callable[..., Any]:
        if not interpret:
            return lambda *args: case.fused(case.ghost(fusion, link()), fusion, *args)
        return functools.partial(case.alike, fusion)

    def plain(*args: Any) -> tuple[jax.Array, ...]:
        return case.plain(case.ghost(legal[0], link()), legal[0], *args)

    key = fusions.key(case.op, case.ranks, case.S, case.experts, case.K, sum(case.widths))
    return tuned.Tuning(
        case.op, key, legal, function, case.inputs, plain, want=case.exact, words=WORDS,
        link="emulated",
    )  # fmt: skip
