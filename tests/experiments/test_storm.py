"""A storm over the job of the elastic tests, which has no jax: every fault found and survived."""

import json
import os
import pathlib
import sys
import time

import pytest

from experiments.faults import storm as storms
from experiments.faults.cluster import SUPERVISE, Cluster, Tail
from experiments.faults.storm import Case, Storm
from experiments.faults.strikes import BY_MAIL, FEW, KINDS, Deeds, Hit, Strike, strikes

NOT_HERE = ("lost step", "flipped bit", "slow", "junk", "full run_dir", "full disk and kill")
JOB = str(pathlib.Path(__file__).parents[1] / "systems" / "elastic" / "lockstep.py")
FLAGS = [
    "--hosts=2",
    "--min_hosts=2",
    "--processes=2",
    "--max_restarts=1000",
    "--silence_s=4",
    "--step_s=4",
    "--start_s=40",
    "--period_s=0.2",
    "--backoff_s=0.1",
]


def test_every_kind_has_a_deed_and_a_place_in_each_round():
    for kind in KINDS:
        name = kind.translate(str.maketrans({" ": "_", ",": None}))
        assert kind in BY_MAIL or hasattr(Deeds, f"_{name}")
    plan, again = strikes(3, tuple(KINDS)), strikes(3, tuple(KINDS))
    for _ in range(3):
        planned = [next(plan) for _ in KINDS]
        assert {s.kind for s in planned} == set(KINDS)
        assert planned == [next(again) for _ in KINDS]
    assert set(FEW) < set(KINDS)


def test_the_driver_that_a_storm_starts_is_there():
    assert pathlib.Path(SUPERVISE).is_file()


def test_the_lines_of_a_file_that_somebody_removes(tmp_path):
    tail = Tail(tmp_path / "x")
    assert tail.rows() == []
    (tmp_path / "x").write_text('{"a": 1}\nno row\n{"b"')
    assert tail.rows() == [{"a": 1}]
    with open(tmp_path / "x", "a") as file:
        file.write(": 2}\n")
    assert tail.rows() == [{"b": 2}]
    (tmp_path / "x").write_text('{"c": 3}\n')
    assert tail.rows() == [{"c": 3}]


def test_what_is_no_lineage_is_told():
    def of(*pairs):
        return [{"step": s, "loss": x, "time": 0.0} for s, x in pairs]

    theirs = of((1, 1.0), (2, 2.0), (3, 3.0))
    assert storms.lineage(of((1, 1.0), (2, 2.0), (2, 2.0), (3, 3.0)), theirs, 3, 2) == []
    (fault,) = storms.lineage(of((1, 1.0), (2, 2.5), (3, 3.0)), theirs, 3, 1)
    assert "1 steps have another loss, the first is 2: 2.5, not 2.0" in fault
    assert storms.lineage(of((1, 1.0), (2, None), (2, 2.0), (3, 3.0)), theirs, 3, 2) == []
    (fault,) = storms.lineage(of((1, 1.0), (2, 2.0), (2, None), (3, 3.0)), theirs, 3, 2)
    assert "1 steps have another loss, the first is 2: None" in fault
    (fault,) = storms.lineage(of((1, 1.0), (2, 2.0), (2, 2.0), (3, 3.0)), theirs, 3, 1)
    assert "began again 1 times in 1 starts" in fault
    (fault,) = storms.lineage(of((1, 1.0), (2, 2.0)), theirs, 3, 1)
    assert fault == "the last step is not 3"


def test_figures_table_and_picture(tmp_path):
    def case(kind, **values):
        return Case(Strike(kind, 0.5), Hit((1,)), 100.0, 7, 0, calmed=100.0, **values)

    cases = [
        case("kill rank", detected=102.0, back=110.0, rule="exit", right=True),
        case("kill rank", detected=104.0, back=130.0, rule="exit", right=False),
        case("stop host"),
        case("junk", back=105.0, alarms=2),
    ]
    rows = storms.rows(cases, 90.0)
    assert (rows[0]["at_s"], rows[0]["found_s"], rows[0]["training_s"]) == (10.0, 2.0, 10.0)
    figures = storms.summary(rows, [{}])
    assert figures["found_s"] == {"median": 2.0, "p90": 4.0, "most": 4.0}
    names = ("to_be_found", "not_found", "wrongly_named", "false_alarms")
    assert [figures[n] for n in names] == [3, 1, 1, 3]
    trained = [{"time": 90.0 + s, "step": s} for s in range(2000)]
    line = storms.line(trained, 90.0)
    assert len(line) < 1100 and line[-1] == [1999.0, 1999]
    about = {"title": "a storm", "line": line, "rows": rows, **figures}
    about |= {"layer": "emulated", "device": "x", "date": "", "commit": ""}
    (tmp_path / "storm.json").write_text(json.dumps(about))
    table = storms.table(tmp_path / "storm.json")
    assert "| kill -9 of a rank | 2 | exit | 2.0, 4.0 | 10.0, 30.0 | 0 |" in table
    assert "| no restart | - | - | 2 |" in table and "not found" in table


@pytest.mark.process
@pytest.mark.slow
def test_a_storm_over_a_small_job(tmp_path):
    steps = [10**6]

    def command():
        return [
            sys.executable,
            JOB,
            str(cluster.run_dir),
            str(steps[0]),
            "5",
            "0.1",
            f"@{tmp_path / 'mail'}",
        ]

    cluster = Cluster(tmp_path, FLAGS, command, 3, os.environ)
    cluster.run_dir.mkdir()
    kinds = tuple(k for k in KINDS if k not in NOT_HERE)
    kinds = tuple(k for k in kinds if cluster.mounted or KINDS[k].needs != "mount")
    storm = Storm(cluster, Deeds(cluster, tmp_path / "mail"), strikes(1, kinds), 100.0)
    try:
        storm.run(float(os.environ.get("STORM_S", "60")))
        assert cluster.driver is not None
        steps[0] = storm.step + 50
        cluster.driver.terminate()
        end = time.monotonic() + 60
        while 0 not in cluster.codes:
            storm.watch(None)
            assert time.monotonic() < end, cluster.tail("driver.txt")
            time.sleep(0.1)
        while left := cluster.leavings():
            cluster.send_home()
            assert time.monotonic() < end + 20, left
            time.sleep(0.2)
        rows = storms.rows(storm.cases, storm.began)
        figures = storms.summary(rows, storm.alarms)
        assert figures["not_found"] == figures["wrongly_named"] == figures["false_alarms"] == 0, (
            rows
        )
        assert len(rows) >= 3
    finally:
        cluster.close()
