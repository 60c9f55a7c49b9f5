"""The planning command as a user meets it: what is refused, and in which words."""

import functools
import json

import pytest

from tests import forks

plan = functools.partial(forks.run, "experiments/plan.py")


@pytest.mark.process
def test_what_does_not_fit_ends_with_2_and_the_term(tmp_path):
    done = plan(
        "--preset=megascale_175b",
        "--cluster=h100:2x8",
        "--mesh.tensor=8",
        "--train.global_batch=16",
        f"--out={tmp_path}",
    )
    assert done.returncode == 2, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("DOES NOT FIT") and "largest term: optimizer" in last
    assert {p.name for p in tmp_path.iterdir()} == {"plan.md", "plan.json", "plan.png"}


@pytest.mark.process
def test_a_cluster_that_cannot_be_read_is_one_line():
    done = plan("--cluster=h300:1x8")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cluster=h300:1x8: h300 must be one of a100, h100")
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_a_search_that_finds_nothing_ends_with_2_and_the_term():
    done = plan(
        "--preset=megascale_175b", "--cluster=h100:1x8", "--train.global_batch=8", "--search"
    )
    assert done.returncode == 2, done.stderr
    assert "legal meshes" in done.stdout and "fit no GPU by their bound" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("DOES NOT FIT") and "largest term: optimizer" in last


@pytest.mark.process
def test_a_plan_is_of_the_weights_that_the_run_would_start_from():
    done = plan("--init_from=nowhere")
    assert done.returncode == 2 and "init_from=nowhere does not exist: give a folder" in done.stderr


@pytest.mark.process
def test_tokens_a_second_of_a_server(tmp_path):
    ask = ("--preset=llama3_1b", "--cluster=h100:1x8", "--train.seq_len=4096", "--workload=serve")
    done = plan(*ask, "--mesh.tensor=2", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "h100:1x8: 4 replicas on 2 GPUs each" in done.stdout
    rows = json.loads((tmp_path / "serve.json").read_text())["rows"]
    rates = [row["tokens_per_s"] for row in rows]
    assert rows[0]["batch"] == 1 and rates == sorted(rates)
    done = plan(*ask, "--mesh.pipe=2")
    assert done.returncode == 2 and "mesh.pipe=2 must be 1: --workload=serve" in done.stderr
