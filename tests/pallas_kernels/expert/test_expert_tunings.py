"""What a tuner measures of the expert kernels on one GPU, which is not here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret as interpreter
from pallas_kernels.collective.cases import RANKS
from pallas_kernels.expert import bench as tunings
from pallas_kernels.expert import fusions, tables
from pallas_kernels.expert.bench import Case, Inputs
from pallas_kernels.expert.fusions import COMBINE, DISPATCH
from pallas_kernels.expert.product import ExpertFusion
from pallas_kernels.hopper import fused
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.tiles import Tile

R, T, A, E = 4, 8, 2, 3
CHUNK = 4


def small(op, widths=(128,)):
    return Case(op, T, A, E, 64, widths, ranks=R, room=R)


@functools.cache
def routes():
    """The same of every case here."""
    case = small(DISPATCH)
    choices = jax.random.randint(jax.random.key(0), (T, A), 0, R * E)
    return jax.jit(case.routes)(choices)


def integers(case, seed):
    """Inputs whose products are exact."""
    arguments, random = case.arguments, np.random.default_rng(seed)

    def draw(like):
        return jnp.asarray(random.integers(-2, 3, like.shape), like.dtype)

    assert jax.tree.map(jnp.shape, arguments.routes) == jax.tree.map(jnp.shape, routes())
    ws = tuple(map(draw, arguments.ws))
    return Inputs(draw(arguments.x), ws, draw(arguments.weight_TA), routes())


def by_hand(case, inputs):
    """(rows by token, answers' row of each choice) of rank ME, every rank's choices in loops."""
    me, routes = case.me, inputs.routes
    expert_TA = (np.asarray(routes.expert_TA) - me * E) % (R * E)  # those of rank 0
    row, rows = {}, []
    for rank in range(R):
        count = 0
        for expert in range(E):
            for distance in range(R):
                source = (rank + distance) % R
                for t, a in np.ndindex(T, A):
                    if (expert_TA[t, a] + source * E) % (R * E) == rank * E + expert:
                        row[source, t, a] = rank, count
                        rows += [t] if rank == me else []
                        count += 1
    return np.array(rows), np.array([[row[me, t, a][1] for a in range(A)] for t in range(T)])


@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_what_is_sent_is_what_comes(op, seed):
    """The copies of one rank's tables, all made on its own page, leave nothing out of a result."""
    case = small(op)
    inputs = integers(case, seed)
    fusion = ExpertFusion(Tile(64, 128, 64, 2, 1, 1), 2, CHUNK)
    work = jax.tree.map(np.asarray, jax.jit(case.work, static_argnums=0)(fusion, inputs.routes))
    jobs_CW, totals = work.jobs_CW[0], work.totals[0]
    token_N, row_TA = by_hand(case, inputs)
    S, x = T * A, np.asarray(inputs.x, np.float64)
    assert totals[tables.END] == S == len(token_N)
    if op == DISPATCH:
        page, sent = np.full((case.rows, 64), np.nan), x
    else:
        page = np.full((S + case.rows, 64), np.nan)
        page[S : 2 * S] = x[:S]
        sent = page
    for job in jobs_CW[: totals[tables.JOBS]]:
        for source, target in job[tables.PAIRS :].reshape(-1, 2)[: job[tables.ROWS]]:
            assert np.isnan(page[target]).all()
            page[target] = sent[source]
    if op == DISPATCH:
        np.testing.assert_array_equal(page[:S], x[token_N])
        np.testing.assert_array_equal(case.came(inputs)[:S], x[token_N])
        assert np.isnan(page[S:]).all()
    else:
        # Answers are rows here: what is multiplied does not matter to what comes where.
        np.testing.assert_array_equal(page[tables.places(inputs.routes)], x[row_TA])
        arrived = sum(-(-int(n) // CHUNK) for n in inputs.routes.counts_RE.sum(1))
        local_jobs = -(-int(inputs.routes.counts_RE[case.me].sum()) // CHUNK)
        assert totals[tables.ARRIVALS] == arrived - local_jobs


SELDOM = pytest.param(COMBINE, (128,), marks=pytest.mark.slow)


@pytest.mark.parametrize(("op", "widths"), [(DISPATCH, (64,)), SELDOM])
def test_what_a_tuner_measures_is_right(op, widths, seed):
    """Interpreted: the kernel gives what it is compared with, and that is right."""
    case = small(op, widths)
    inputs = integers(case, seed)
    fusion = ExpertFusion(Tile(64, widths[0], 64, 2, 1, 1), 2, 8)
    with interpreter.checked():
        results = tunings.tuning(case).function(fusion, True)(*inputs)
    want = jax.jit(case.exact)(*inputs)
    token_N, row_TA = by_hand(case, inputs)
    S, x = T * A, np.asarray(inputs.x, np.float64)
    expert_N = np.repeat(np.arange(E), inputs.routes.sizes_E)
    for i, w in enumerate(inputs.ws):
        rows = x[token_N] if op == DISPATCH else x[:S]
        answers = np.einsum("nk,nkf->nf", rows, np.asarray(w, np.float64)[expert_N])
        if op == COMBINE:
            answers = np.einsum("ta,tad->td", inputs.weight_TA, answers[row_TA])
        exact = jnp.asarray(answers, jnp.bfloat16)
        for y in (results[i], want[i]):
            np.testing.assert_array_equal(y[: len(exact)], exact)
            assert not y[len(exact) :].any()


@pytest.mark.parametrize("choices", [1, 4])
def test_a_rival_sends_no_more_than_plain_xla(choices):
    """All-gathered where ranks are few; else the rows that are needed."""
    case = dataclasses.replace(small(DISPATCH), choices=choices)
    fusion = dataclasses.replace(case.fusions()[0], chunk=CHUNK)
    text = str(jax.make_jaxpr(tunings.tuning(case).reference)(*case.arguments))
    assert ("name=all_gather" in text) == (choices == 4) != ("name=send_rows" in text)
    if choices == 4:
        case = dataclasses.replace(case, op=COMBINE)
        jaxpr = jax.make_jaxpr(tunings.tuning(case).reference)(*case.arguments)
        (call,) = (eqn for eqn in jaxpr.eqns if "name=all_gather" in str(eqn))
        assert call.outvars[0].aval.dtype == "bfloat16"  # as a model's own sums
    assert case.ghost(fusion, 1e9).bytes_per_s * fusion.comm == 1e9


def test_tunings_are_legal_and_differ():
    """Of each the heuristic's fusion comes first, and the table's row is read back as it was."""
    every = tunings.tunings()
    assert len({(t.op, *t.key.values()) for t in every}) == len(every) == 12
    for case, tuning in zip(tunings.tuned_cases(), every, strict=True):
        sizes = RANKS, case.S, case.experts, case.K, list(case.widths), case.sums.out_dtype
        assert tuning.candidates[0] == fusions.heuristic(case.op, *sizes)
        assert len(set(tuning.candidates)) == len(tuning.candidates) >= len(fusions.COMM)
        assert {fusion.comm for fusion in tuning.candidates} == set(fusions.COMM)
        for fusion in tuning.candidates:
            fused.clusters_of(case.op, fusion, case.ghost(fusion, 1e9), SMS)
            assert fusions.load(dataclasses.asdict(fusion)) == fusion
