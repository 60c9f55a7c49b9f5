"""The tuner on tilings that are made up, with a clock that is made up."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuned

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import tune

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


def clock(jitted, *args):
    return jitted.__wrapped__.seconds


def run(wanted, path, deadline=100.0, **options):
    return tune.tune(
        [("folder", each) for each in wanted], path, clock, time.perf_counter() + deadline,
        runs=3, **options,
    )  # fmt: skip


def test_the_fastest_right_tile_wins(tmp_path):
    path = tmp_path / "gpu.json"
    assert run([tuning()], path) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["tile"] == {"name": "good", "seconds": 2.0} and row["fastest"] == "hopper"
    assert row["median_us"] == 2e6 and row["rivals"] == {"reference": 3e6}
    assert row["heuristic_us"] == 5e6 and row["date"] and "commit" in row
    assert [reason.split(",")[0] for reason in row["failed"]] == [
        "Tile(name='wrong'", "Tile(name='breaks'",
    ]  # fmt: skip
    # It is what the kernels find.
    found = tuned.find("double", {"width": 8}, kind="gpu", folder=tmp_path)
    assert found is not None and found["tile"] == row["tile"]


def test_plain_jax_may_be_the_fastest(tmp_path):
    path = tmp_path / "gpu.json"
    run([tuning(tiles=TILES[:1])], path)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["fastest"] == "reference" and row["tile"]["name"] == "slow"
    # A rival that gives something else, and other words for the two.
    apart = dataclasses.replace(tuning(reference=scaled), want=plain, words=("fused", "xla"))
    run([apart], path, again=True)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["fastest"] == "fused" and row["rivals"] == {"reference": 4e6}


def test_a_second_call_measures_what_is_missing(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert run([tuning()], path, deadline=-1.0) == 0 and not path.exists()
    assert "out of time; call again" in capsys.readouterr().out
    run([tuning()], path)
    capsys.readouterr()
    run([tuning(), tuning(longest=64)], path)
    assert capsys.readouterr().out.count("is faster") == 1
    assert len(json.loads(path.read_text())["rows"]) == 2
    run([tuning(tiles=TILES[:1])], path, again=True)
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 and rows[-1]["tile"]["name"] == "slow"


def test_what_cannot_be_measured_says_why(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert run([tuning(tiles=TILES[1:3])], path) == 1 and not path.exists()
    out = capsys.readouterr().out
    assert "differs from the reference by" in out and "does not fit" in out


def test_other_rivals_are_timed_and_may_be_missing(tmp_path):
    def other(x, y):
        return x + y

    other.seconds = 1.0
    inputs = lambda key: (jnp.ones(4), jnp.ones(4))  # noqa: E731
    others = {"cudnn": (other, inputs), "absent": (lambda x: x, inputs)}
    path = tmp_path / "gpu.json"
    assert run([dataclasses.replace(tuning(), others=others)], path) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["rivals"] == {"reference": 3e6, "cudnn": 1e6} and row["fastest"] == "hopper"
    assert row["failed"][-1].startswith("absent: ")


def test_every_tuning_has_a_reference_of_its_kernels_results():
    """One of each op: shapes and types of the kernel and of plain JAX agree."""
    seen = set()
    for _, each in tune.tunings():
        if each.op in seen:
            continue
        seen.add(each.op)
        args = jax.eval_shape(each.inputs, jax.random.key(0))
        found = jax.eval_shape(each.function(each.candidates[0], False), *args)
        want = jax.eval_shape(each.want or each.reference, *args)
        jax.eval_shape(each.reference, *args)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(found)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(want)
        ]
    assert len(seen) == 12


def test_results_that_are_not_finite_are_wrong():
    want = (jnp.array([1.0, -jnp.inf]), jnp.array([2.0]))
    assert tune.wrong(want, want) is None
    assert "not finite" in (tune.wrong((want[0], jnp.array([jnp.nan])), want) or "")


@pytest.mark.slow
def test_a_rehearsal_times_the_real_kernel(tmp_path):
    """Through the interpreter, against the plain reference."""
    from pallas_kernels import bench

    path = tmp_path / "cpu.json"
    deadline = time.perf_counter() + 100
    assert (
        tune.tune([("tiny", tune.tiny())], path, bench.wall_clock, deadline, runs=1, interpret=True)
        == 0
    )
    (row,) = json.loads(path.read_text())["rows"]
    assert row["tile"]["block_k"] == 64 and not row["failed"]
