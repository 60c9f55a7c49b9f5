"""LLM-PQ's planner against every placement tried, and its closed form against the simulator."""

import ctypes
import dataclasses
import json
import math
import threading
import time

import numpy as np
import pytest
import tried_placements

from megajax.core.errors import UserError
from megajax.systems.llm_pq import Placement, Problem, milp, solve
from megajax.systems.llm_pq import solver as solver_
from megajax.systems.llm_pq.problem import (
    arrange,
    omega_of,
    pipeline_s,
    simulate,
    timed,
    violations,
)
from megajax.systems.llm_pq.solver import climb_stages

# (seed, members that are others): unlike and alike layers, twins, ragged micro-batches, unused
# devices, one device, hops that dominate.
CASES = [
    (0, {}), (1, {}), (2, {"devices": 2, "bits": (3, 4, 8)}), (3, {"layers": 6, "bits": (4, 16)}),
    (4, {"requests": 5}), (5, {"alike": True}), (6, {"alike": True, "layers": 6}),
    (7, {"memory": [14.0, 14.0, 9.0]}), (8, {"devices": 1, "memory": [60.0]}),
    (9, {"prefill_hop_s": {1: 9.0, 2: 9.0, 4: 9.0}, "decode_hop_s": {1: 4.0, 2: 5.0, 4: 6.0}}),
    (10, {"memory": [90.0, 1.0, 20.0]}),
    (11, {"memory": [14.0, 14.0, 14.0], "prefill_hop_s": {1: 9.0, 2: 11.0, 4: 40.0},
          "decode_hop_s": {1: 9.0, 2: 12.0, 4: 30.0}}),
]  # fmt: skip
QUICK = (2, 3, 7, 8, 10, 11)


def check(seed: int, changes: dict, solvers: tuple[str, ...] = ("exact",)) -> int:
    """Compares both with and without a bound of quality. Returns how many placements there are."""
    p = tried_placements.problem(seed, **changes)
    if 7 == seed:  # two devices of one kind
        p = twins(p)
    placements = 0
    for quality in (None, p.omega[:, -2].sum(), 1.15 * p.omega[:, -1].sum()):
        tried = tried_placements.best(p, quality)
        for solver in solvers:
            if tried is None:
                with pytest.raises(UserError):
                    solve(p, quality=quality, solver=solver)
                continue
            got = solve(p, quality=quality, solver=solver)
            seconds = got.prefill_s + got.decode_s
            assert violations(p, got.stages, got.bits, quality) == []
            assert got.tokens_per_s == pytest.approx(p.requests * p.new_tokens / seconds)
            assert seconds == pytest.approx(tried[-1], rel=1e-6), (quality, solver, tried)
            assert got.gap == 0 and got.status == "optimal"
            assert got.omega == pytest.approx(omega_of(p, got.bits))
            placements += 1
    return placements


def twins(p: Problem) -> Problem:
    """Returns the problem with the first device in the place of the second too."""

    def twice(tables):
        return {size: rows[[0, 0, *range(2, len(rows))]] for size, rows in tables.items()}

    return dataclasses.replace(p, prefill_s=twice(p.prefill_s), decode_s=twice(p.decode_s))


@pytest.mark.parametrize(
    ("seed", "changes"),
    [pytest.param(*c, marks=[] if c[0] in QUICK else pytest.mark.slow) for c in CASES],
)
def test_exact_equals_every_placement_tried(seed, changes):
    check(seed, changes)


def test_counts_equal_every_placement_tried_where_layers_are_alike():
    assert check(5, {"alike": True}, ("counts",))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_exact_on_many_problems(seed):
    check(seed, {"layers": 4 + seed % 3, "bits": (3, 4, 8) if seed % 2 else (4, 16)})
    check(seed, {"alike": True}, ("exact", "counts"))


def test_the_cases_have_placements():
    """A test whose problems have no placement compares nothing."""
    problems = [tried_placements.problem(seed, **changes) for seed, changes in CASES]
    assert sum(tried_placements.best(p, None) is not None for p in problems) >= 8


@pytest.mark.parametrize("seed", range(3))
def test_transfer_is_legal_and_tells_its_gap(seed):
    p = tried_placements.problem(seed, layers=6)
    quality = p.omega[:, 1].sum()
    tried = tried_placements.best(p, quality)
    if tried is None:
        with pytest.raises(UserError):
            solve(p, quality=quality, solver="transfer")
        return
    got = solve(p, quality=quality, solver="transfer")
    seconds = got.prefill_s + got.decode_s
    assert violations(p, got.stages, got.bits, quality) == []
    assert seconds >= tried[-1] * (1 - 1e-9)
    assert seconds * (1 - got.gap) <= tried[-1] * (1 + 1e-9)  # the bound is one
    assert got.gap < 1


def test_the_simulator_agrees_with_the_closed_form():
    """Random pipelines, links that are the slowest place among them."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        places = rng.uniform(0.1, 2.0, rng.integers(1, 8))
        m, n = int(rng.integers(1, 9)), int(rng.integers(1, 12))
        total, slowest = places.sum(), places.max()
        lap = max(total, m * slowest)
        expected = (n - 1) * lap + total + (m - 1) * slowest
        got = pipeline_s(lambda _b, _r, each=places: each, m, n)
        assert got == pytest.approx(expected, rel=1e-9)


def test_simulating_a_placement():
    p = tried_placements.problem(1, requests=4, new_tokens=7)
    got = solve(p)
    times = simulate(p, got)
    assert times.prefill_s == pytest.approx(got.prefill_s)
    assert times.decode_s == pytest.approx(got.decode_s)
    assert times.tokens_per_s == pytest.approx(got.tokens_per_s)


# Seconds that the planner's first event loop, which was a queue of arrivals, gave for unlike times.
KNOWN_S = (
    42.04172499263717,
    40.40408249317708,
    9.40301156901359,
    6.18288152044826,
    81.27439293628704,
    10.437587932333077,
)


@pytest.mark.parametrize("case", range(len(KNOWN_S)))
def test_the_simulator_agrees_with_a_queue_of_arrivals(case):
    """Times differ by micro-batch, round and place, and some are 0; equal to the last bit."""
    rng = np.random.default_rng(case)
    places, m, n = (int(rng.integers(1, most)) for most in (8, 9, 12))
    seconds = rng.uniform(0.0, 2.0, (m, n, places)) * rng.integers(0, 2, (m, n, places))
    assert pipeline_s(lambda batch, lap: seconds[batch, lap], m, n) == KNOWN_S[case]


def test_the_simulator_serves_first_come_first_served():
    """Two micro-batches of unlike lengths, by hand.

    The first takes 3 and 1, the second 1 and 5. Stage 0: first until 3, second until 4. Stage 1:
    first 3-4, second 4-9. The first is back at 4: stage 0 4-7, stage 1 9-10; the second is back at
    9: stage 0 9-10, stage 1 10-15.
    """
    each = [(3.0, 1.0), (1.0, 5.0)]
    assert pipeline_s(lambda batch, _round: each[batch], 2, 2) == 15.0


def test_arrange_finds_the_least_loss():
    """Against the brute force over orders and widths, of given counts."""
    import itertools

    for seed in range(4):
        p = tried_placements.problem(seed, memory=[40.0, 11.0, 40.0])
        counts = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]])
        least = np.inf
        for order in itertools.permutations(range(3)):
            for widths in itertools.product(range(3), repeat=5):
                edges = np.cumsum([0, *counts[list(order)].sum(1)])
                spans = list(itertools.pairwise(edges))
                same = all(
                    (np.bincount(widths[a:b], minlength=3) == counts[d]).all()
                    for d, (a, b) in zip(order, spans, strict=True)
                )
                bits = [p.bits[b] for b in widths]
                stages = [(d, a, b) for d, (a, b) in zip(order, spans, strict=True)]
                if same and not violations(p, stages, bits, None):
                    least = min(least, omega_of(p, bits))
        arranged = arrange(p, counts)
        assert arranged is not None
        assert omega_of(p, arranged[1]) == pytest.approx(least)
        assert violations(p, *arranged, None) == []


def test_when_the_time_ends_any_order_that_fits_is_taken():
    p = tried_placements.problem(0, memory=[2.0, 40.0, 40.0])
    counts = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]])  # the first device has no room for an end
    stages, bits = arrange(p, counts, deadline=0.0)
    assert violations(p, stages, bits, None) == []
    assert [d for d, _, _ in stages] == [1, 0, 2]
    assert arrange(dataclasses.replace(p, memory=[2.0, 2.0, 40.0]), counts, deadline=0.0) is None


def test_a_search_of_many_unlike_devices_ends_in_time():
    rng = np.random.default_rng(0)
    p = tried_placements.problem(0, layers=40, devices=18, memory=rng.uniform(12, 20, 18))
    began = time.monotonic()
    for solver in ("exact", "transfer"):
        solve(p, solver=solver, time_limit_s=1)
    assert time.monotonic() - began < 8  # the order of the devices alone took 15 s for one


def test_missing_bytes_count_where_unlike_layers_stand():
    """Layers 0 and 2 must be wide, and one device cannot hold both with the layer between."""
    once, free = {1: np.ones((2, 2))}, {1: 0.0}
    for memory, missing in (([7.9, 1.0], 1.1), ([8.0, 1.0], 1.0), ([7.9, 1.1], 1.1)):
        p = Problem(
            bits=(4, 16), omega=[[1, 0], [0, 0], [1, 0]], prefill_s=once, decode_s=once,
            prefill_hop_s=free, decode_hop_s=free, layer_bytes=[1e6, 4e6], cache_bytes=0,
            first_bytes=0, last_bytes=0, memory=np.array(memory) * 1e6, requests=1, new_tokens=2,
        )  # fmt: skip
        with pytest.raises(UserError, match=rf": {missing * 1e6:.0f} bytes are missing"):
            solve(p, quality=0.0)


def test_what_is_missing_is_told():
    p = tried_placements.problem(0, devices=1, memory=[6.0])
    # 5 layers of 1 byte at 4 bits and 0.5 of cache, 2.7 at the ends: 10.2 bytes.
    with pytest.raises(UserError, match=r"memory.* 4.2 bytes are missing.*weights at 4 bits 5"):
        solve(p)
    scaled = dataclasses.replace(
        p,
        memory=[6000.0],
        layer_bytes=1000 * p.layer_bytes,
        cache_bytes=500.0,
        first_bytes=1000.0,
        last_bytes=1700.0,
    )
    with pytest.raises(UserError, match=r"4200 bytes are missing.*takes 10200 bytes"):
        solve(scaled)
    # Layers are whole: 9500 bytes, but each end holds one layer of 1500 only beside its 1000.
    p = tried_placements.problem(0)
    p = dataclasses.replace(
        p,
        memory=[3900.0, 2000.0, 3900.0],
        layer_bytes=1000 * p.layer_bytes,
        cache_bytes=500.0,
        first_bytes=1000.0,
        last_bytes=1000.0,
    )
    with pytest.raises(UserError, match=r" 200 bytes are missing.*a layer cannot be cut"):
        solve(p)


def test_bytes_in_other_units_and_one_byte_too_few():
    """Numbers below 1, such as gigabytes, and a device that lacks one byte of ten billion."""
    p = tried_placements.problem(0, devices=1, memory=[6e-3])
    small = {"cache_bytes": 5e-4, "first_bytes": 1e-3, "last_bytes": 1.7e-3}
    p = dataclasses.replace(p, layer_bytes=1e-3 * p.layer_bytes, **small)
    with pytest.raises(UserError, match=r"memory.* 0\.0042 bytes are missing"):
        solve(p)
    large = {"cache_bytes": 0, "first_bytes": 0, "last_bytes": 0, "memory": [1e10 - 1]}
    p = dataclasses.replace(p, layer_bytes=[2e9, 4e9, 8e9], **large)
    with pytest.raises(UserError, match=r"memory.* 1 bytes are missing"):
        solve(p)
    assert set(solve(dataclasses.replace(p, memory=[1e10])).bits) == {4}


@pytest.mark.slow
def test_numbers_of_unlike_size():
    """HiGHS keeps a row to an absolute 1e-6: a memory without a limit, or a layer that loses a
    million times as much as another, must not make other rows coarse."""
    placements = 0
    for seed in range(6):
        p = tried_placements.problem(seed, layers=4)
        unlike = np.random.default_rng(seed).permutation(np.logspace(-5, 3, 4))[:, None]
        wide = dataclasses.replace(p, omega=p.omega * unlike)
        for size in (1e6, 1e12):
            memory = p.memory.copy()
            memory[seed % 3] = size
            placements += check_best(dataclasses.replace(p, memory=memory), p.omega[:, 1].sum())
        placements += check_best(wide, wide.omega[:, 1].sum())
        placements += check_best(dataclasses.replace(p, **slowed(p, seed)), None)
        placements += check_best(wide, wide.omega[[0, 1, 2, 3], [2, 0, 1, 2]].sum())
    assert placements > 20


def slowed(p: Problem, seed: int) -> dict:
    """Returns the tables of seconds of devices that are up to 1e9 times as fast as each other."""
    factor = np.random.default_rng(seed).permutation([1e-5, 1.0, 1e4])[:, None]
    return {
        name: {size: factor * rows for size, rows in getattr(p, name).items()}
        for name in ("prefill_s", "decode_s")
    }


def check_best(p: Problem, quality: float | None) -> bool:
    """Compares with every placement tried. Returns whether there is one."""
    tried = tried_placements.best(p, quality)
    if tried is None:
        with pytest.raises(UserError, match="bytes are missing"):
            solve(p, quality=quality)
        return False
    got = solve(p, quality=quality)
    assert violations(p, got.stages, got.bits, quality) == []
    assert got.prefill_s + got.decode_s == pytest.approx(tried[-1], rel=1e-6)
    assert got.gap == 0 and got.status == "optimal"
    return True


@pytest.mark.parametrize("solver", ["exact", "transfer"])
def test_what_takes_no_time_and_no_bytes(solver):
    p = tried_placements.problem(2)
    fast = {size: rows * [[0.0], [1.0], [1.0]] for size, rows in p.decode_s.items()}
    got = solve(dataclasses.replace(p, decode_s=fast), solver=solver)
    assert solver == "transfer" or got.gap == 0
    none = {size: 0 * rows for size, rows in p.decode_s.items()}
    free = dataclasses.replace(p, layer_bytes=[0, 0, 0], cache_bytes=0)
    assert violations(free, *solve_parts(free, solver), None) == []
    hops = dict.fromkeys(none, 0)
    still = dataclasses.replace(
        free, prefill_s=none, decode_s=none, prefill_hop_s=hops, decode_hop_s=hops
    )
    assert solve(still, solver=solver).tokens_per_s == float("inf")


def solve_parts(p: Problem, solver: str) -> tuple:
    """Returns (stages, bits)."""
    got = solve(p, solver=solver)
    return got.stages, got.bits


def test_a_quality_that_no_widths_have():
    p = tried_placements.problem(0)
    for quality in (0.5 * p.omega.min(1).sum(), 0, -1):
        for solver in ("exact", "counts", "transfer"):
            with pytest.raises(UserError, match="below the least sum of omega"):
                solve(p, quality=quality, solver=solver)
    lossless = dataclasses.replace(p, omega=p.omega - p.omega.min(1, keepdims=True))
    with pytest.raises(UserError, match="below the least sum of omega"):
        solve(lossless, quality=-1)


@pytest.mark.parametrize("seed", range(4))
def test_the_nearest_quality_that_is_told_is_accepted(seed):
    """In six digits it may be less than the least sum, and is refused again."""
    p = tried_placements.problem(seed, devices=1, memory=[100.0])
    with pytest.raises(UserError, match="nearest: ") as error:
        solve(p, quality=0.5 * p.omega.min(1).sum())
    got = solve(p, quality=float(str(error.value).rpartition(" ")[2]))
    assert got.omega == pytest.approx(p.omega.min(1).sum())


def test_twins_in_another_order_are_the_same_stages():
    """`milp.Layers` has twins in the order of their numbers; counts are arranged in any order."""
    p = twins(tried_placements.problem(7, memory=[40.0, 40.0, 30.0]))
    assert p.in_twin_order([(1, 0, 2), (2, 2, 3), (0, 3, 5)]) == ((0, 0, 2), (2, 2, 3), (1, 3, 5))
    assert p.in_twin_order([(1, 0, 5)]) == ((0, 0, 5),)
    assert p.in_twin_order([(2, 0, 2), (1, 2, 5)]) == ((2, 0, 2), (0, 2, 5))
    quality, stages = p.omega[:, 1].sum(), ((1, 0, 2), (2, 2, 3), (0, 3, 5))
    state = solver_.Search(p, quality, time.monotonic() + 60, bounds={(1, 1): 0.0})
    state.hints[(1, 1), stages] = None
    climb_stages(state, 30)
    assert state.best is not None  # the widths of these stages, at least
    bits = state.best[1]
    assert timed(p, stages, bits, 1, 1).seconds >= state.seconds


def test_a_heuristic_without_a_placement_does_not_blame_the_time(monkeypatch):
    p = tried_placements.problem(0)
    monkeypatch.setattr("megajax.systems.llm_pq.solver.transfer", lambda *_: None)
    monkeypatch.setattr("megajax.systems.llm_pq.solver.arrange", lambda *_: None)
    with pytest.raises(UserError, match="does not prove that there is none; nearest: exact"):
        solve(p, solver="transfer")


def test_options_are_checked():
    p = tried_placements.problem(0)
    for other in (None, "case3", p.omega):
        with pytest.raises(UserError, match="problem must be an llm_pq.Problem, got a "):
            solve(other)
    with pytest.raises(UserError, match="Did you mean exact"):
        solve(p, solver="exac")
    for limit in (0, -1, float("nan"), "60", None):
        with pytest.raises(UserError, match="time_limit_s"):
            solve(p, time_limit_s=limit)
    for quality in (float("nan"), "equal", "1", [1.0]):
        with pytest.raises(UserError, match="quality"):
            solve(p, quality=quality)
    for member, value in [
        ("omega", -p.omega), ("memory", [[1.0]]), ("layer_bytes", [1.0]), ("bits", (4, 4, 8)),
        ("requests", 0), ("prefill_hop_s", {1: 0.0}), ("cache_bytes", float("nan")),
        ("decode_s", {0: p.decode_s[1]}), ("decode_s", {1: p.decode_s[1][:2]}),
        ("decode_s", {1.5: p.decode_s[1]}), ("decode_s", {"1": p.decode_s[1]}),
        ("decode_s", [p.decode_s[1]]), ("decode_s", None), ("decode_hop_s", 0.1),
        ("bits", (4.5, 8, 16)), ("bits", (-4, 8, 16)), ("bits", None), ("bits", "4,8"),
        ("requests", 2.5), ("requests", float("inf")), ("requests", "4"), ("new_tokens", None),
        ("omega", p.omega * 1j), ("memory", []),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=member.removesuffix("_hop_s")):
            dataclasses.replace(p, **{member: value})


def test_saved_and_loaded(tmp_path):
    got = solve(tried_placements.problem(1))
    got.save(tmp_path / "placement.json")
    assert Placement.load(tmp_path / "placement.json") == got
    text = (tmp_path / "placement.json").read_text()
    batch = f'"decode_batch": {got.decode_batch}'
    assert batch in text
    for other in ("null", '"2"', "0", "1.5"):
        (tmp_path / "other.json").write_text(text.replace(batch, f'"decode_batch": {other}'))
        with pytest.raises(UserError, match="no placement.*decode_batch must be a whole number"):
            Placement.load(tmp_path / "other.json")
    for other in ('{"stages": 3}', (tmp_path / "placement.json").read_text().replace("0.0", "[]")):
        (tmp_path / "other.json").write_text(other)
        with pytest.raises(UserError, match="no placement"):
            Placement.load(tmp_path / "other.json")


def test_a_placement_without_time_is_valid_json(tmp_path):
    """Its infinitely many tokens a second are null there; a cut-off write leaves the old file."""
    path = tmp_path / "placement.json"
    got = dataclasses.replace(solve(tried_placements.problem(1)), tokens_per_s=math.inf)
    got.save(path)
    written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert written["tokens_per_s"] is None and Placement.load(path) == got
    dataclasses.replace(got, gap=math.nan).save(tmp_path / "unknown.json")
    again = Placement.load(tmp_path / "unknown.json")
    assert math.isnan(again.gap) and dataclasses.replace(again, gap=got.gap) == got
    with pytest.raises(TypeError):
        dataclasses.replace(got, status=object()).save(path)
    assert Placement.load(path) == got


def test_an_interrupted_search_gives_the_best_so_far(monkeypatch):
    """Ctrl-C during the second program: the first one's placement comes back, with its gap."""
    p = tried_placements.problem(1)
    solve_counts, tolerances = milp.Counts.solve, []

    def interrupted(program, seconds, gap=0.0, integer=True):
        tolerances.append(gap)
        if np.count_nonzero(tolerances) > 1:  # bounds are solved without a tolerance
            raise KeyboardInterrupt
        return solve_counts(program, seconds, gap, integer)

    monkeypatch.setattr(milp.Counts, "solve", interrupted)
    monkeypatch.setattr(solver_, "attended", lambda program: program())
    got = solve(p)
    assert got.status == "interrupted" and 0 <= got.gap < 1
    assert violations(p, got.stages, got.bits, None) == []
    assert timed(p, got.stages, got.bits, got.prefill_batch, got.decode_batch).seconds > 0


def test_highs_runs_beside_the_main_thread():
    """Ctrl-C reaches Python only when C++ code returns, so HiGHS runs in another thread."""
    seen = []
    solver_.attended(lambda: seen.append(threading.current_thread()))
    assert seen[0] is not threading.main_thread()


def test_what_c_code_prints_goes_to_stderr(capfd):
    """A line of HiGHS that no option turns off stays out of what a command prints."""
    solver_.attended(lambda: ctypes.CDLL(None).puts(b"of C"))
    print("of Python")
    out, err = capfd.readouterr()
    assert out == "of Python\n" and err == "of C\n"


@pytest.mark.parametrize("seed", [12, 38, 39])
def test_the_program_over_layers_cuts_no_layer(seed):
    """Two devices that share layers by halves would lose less quality than any stages do."""
    rng = np.random.default_rng(seed)
    tables = {1: rng.uniform(0.5, 3, (3, 1)) * rng.uniform(1, 2, (3, 2))}
    p = tried_placements.problem(seed, bits=(4, 8), prefill_s=tables, decode_s=tables)
    worst, least = p.omega.max(1).sum(), p.omega.min(1).sum()
    for share in (0.3, 0.5, 0.7):
        quality = least + share * (worst - least)
        tried = tried_placements.best(p, quality)
        program = milp.Layers(p, (1, 1), quality)
        solution = program.solve(10)
        assert solution.x is not None and tried is not None
        assert violations(p, *program.plan(solution.x), quality) == []
        assert solution.value == pytest.approx(tried[-1], rel=1e-6)
