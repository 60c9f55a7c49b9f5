"""The tuner on tilings that are made up, with programs and a clock that are made up."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuned

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_check

from scripts.gpu_session import channel as worker_channel
from scripts.gpu_session import session as workers
from scripts.gpu_session import tune as gpu_tune

sys.path.pop(0)


@dataclasses.dataclass(frozen=True)
class Tile:
    """What the made-up kernel does, and how long it takes."""

    name: str
    seconds: float


def function(tile, interpret):
    def run(x):
        if tile.name == "breaks":
            raise ValueError("does not fit")
        return x + (1 if tile.name == "wrong" else 0)

    run.seconds = tile.seconds
    return run


def plain(x):
    return x


def scaled(x):
    return 2 * x


plain.seconds, scaled.seconds = 3.0, 4.0
TILES = (Tile("slow", 5.0), Tile("wrong", 0.1), Tile("breaks", 0.1), Tile("good", 2.0))


def tuning(tiles=TILES, reference=plain, **key):
    inputs = lambda key: (jax.random.normal(key, (8,)),)  # noqa: E731
    return tuned.Tuning("double", {"width": 8} | key, tiles, function, inputs, reference)


class Program:
    """In the place of a compiled one."""

    def __init__(self, function, like, sets):
        jax.eval_shape(function, *like)
        self.function, self.sets, self.seconds = function, sets, sets * function.seconds

    def __call__(self, *sets):
        assert len(sets) == self.sets
        return [self.function(*args) for args in sets]


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    monkeypatch.setattr(gpu_tune, "compiled", Program)
    monkeypatch.setattr(gpu_tune.bench, "COLD_BYTES", 1)


def clock(program, args, launches):
    return "made up", [program.seconds] * launches


class Parent:
    """Keeps what it is told."""

    def __init__(self, skip=()):
        self.spec, self.stages = {"skip": list(skip)}, []

    def stage(self, name, limit_s, item=None, skip=""):
        self.stages.append((name, skip))


def measure(problem, parent=None):
    """Returns the row."""
    measurement = gpu_tune.Measurement("it", problem, parent or Parent(), clock)
    measurement.prepare()
    return measurement.run()


def test_the_fastest_right_tile_wins(tmp_path, monkeypatch):
    row = measure(tuning())
    assert row["tile"] == {"name": "good", "seconds": 2.0} and row["fastest"] == "hopper"
    assert row["median_us"] == 2e6 and row["rivals"] == {"reference": 3e6}
    assert row["heuristic_us"] == 5e6 and row["clock"] == "made up" and row["candidates"] == 4
    assert sorted(reason.split(",")[0] for reason in row["failed"]) == [
        "Tile(name='breaks'",
        "Tile(name='wrong'",
    ]
    # It is what the kernels find, once the parent has written it.
    store = workers.Store(tmp_path, "abc")
    store.open("GPU", "gpu")
    store.add(gpu_check.tuning("it"), "it", [row])
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    row_of_table = tuned.find("double", {"width": 8}, kind="gpu")
    assert row_of_table is not None and row_of_table["tile"] == row["tile"]
    assert tuned.against(row_of_table) is None and "link" not in row
    emulated = measure(dataclasses.replace(tuning(), words=("fused", "xla"), link="emulated"))
    assert "emulated" in tuned.against(emulated | {"octaves": 0.0}, "fused")
    assert json.loads((tmp_path / "gpu.json").read_text())["commit"] == "abc"


def test_plain_jax_may_be_the_fastest():
    row = measure(tuning(tiles=TILES[:1]))
    assert row["fastest"] == "reference" and row["tile"]["name"] == "slow"
    # A rival that gives something else, and other words for the two.
    apart = dataclasses.replace(tuning(reference=scaled), want=plain, words=("fused", "xla"))
    row = measure(apart)
    assert row["fastest"] == "fused" and row["rivals"] == {"reference": 4e6}


def test_each_candidate_is_a_stage_and_one_that_hung_is_left_out():
    parent = Parent(skip=[str(TILES[3])])
    row = measure(tuning(), parent)
    assert row["tile"]["name"] == "slow" and f"{TILES[3]}: was killed" in row["failed"]
    assert {skip for _, skip in parent.stages} == {"", *map(str, TILES[:3])}
    assert (f"run {TILES[0]}", str(TILES[0])) in parent.stages


def test_what_cannot_be_measured_says_why():
    with pytest.raises(RuntimeError, match="does not fit.*differs from the reference by"):
        measure(tuning(tiles=TILES[1:3]))


def test_a_cuda_error_ends_the_process():
    def poisoned(tile, interpret):
        def run(x):
            if isinstance(x, jax.core.Tracer):
                return x
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

        run.seconds = 1.0
        return run

    with pytest.raises(RuntimeError) as error:
        measure(dataclasses.replace(tuning(), function=poisoned))
    assert worker_channel.is_poison(error.value)


def test_other_rivals_are_timed_and_may_be_missing():
    def other(x, y):
        return x + y

    other.seconds = 1.0
    inputs = lambda key: (jnp.ones(4), jnp.ones(4))  # noqa: E731
    others = {"cudnn": (other, inputs), "absent": (lambda x: x, inputs)}
    row = measure(dataclasses.replace(tuning(), others=others))
    assert row["rivals"] == {"reference": 3e6, "cudnn": 1e6} and row["fastest"] == "hopper"
    assert row["failed"][-1].startswith("absent: ")


@pytest.fixture(scope="module")
def tunings():
    return gpu_tune.tunings()


def test_the_tunings_that_come_first_are_there(tunings):
    names = {gpu_tune.name_of(*each) for each in tunings}
    assert {*gpu_check.TUNE_FIRST, *gpu_check.TUNE_SERVED} <= names
    assert len(set(gpu_check.TUNE_FIRST)) == 23


def test_every_tuning_has_a_reference_of_its_kernels_results(tunings):
    """One of each op: shapes and types of the kernel and of plain JAX agree."""
    seen = set()
    for _, each in tunings:
        if each.op in seen:
            continue
        seen.add(each.op)
        args = jax.eval_shape(each.inputs, jax.random.key(0))
        result = jax.eval_shape(each.function(each.candidates[0], False), *args)
        want = jax.eval_shape(each.want or each.reference, *args)
        jax.eval_shape(each.reference, *args)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(result)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(want)
        ]
    assert len(seen) == 19


def test_results_that_are_not_finite_are_wrong():
    want = (jnp.array([1.0, -jnp.inf]), jnp.array([2.0]))
    assert gpu_tune.wrong(want, want) is None
    assert "not finite" in (gpu_tune.wrong((want[0], jnp.array([jnp.nan])), want) or "")
