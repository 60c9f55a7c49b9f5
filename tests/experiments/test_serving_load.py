"""The load generator, and the experiment as a user meets it."""

import functools
import json

import numpy as np
import pytest

from experiments.reports import serving
from experiments.reports.serving import MODES, Request
from megajax.core.errors import UserError
from megajax.serving import Engine
from tests import forks
from tests.plain_loop import CFG, SMALL, sharp

experiment = functools.partial(forks.run, "experiments/serving.py")
LOAD = [Request([1, 2, 3], 5), Request([4], 2), Request(list(range(20)), 9), Request([7, 8], 1)]


@pytest.fixture(scope="module")
def engine():
    return Engine(CFG, sharp(CFG), **SMALL, page_size=4, pages=80)


def test_requests_have_the_corpus_lengths_and_share_prefixes(tmp_path):
    text = "\n\n".join("x" * n for n in range(10, 400))
    (tmp_path / "a.txt").write_text(text)
    load = serving.requests(str(tmp_path), 300, 0)
    assert load == serving.requests(str(tmp_path), 300, 0)
    prompts = [len(r.prompt) for r in load]
    assert max(prompts) <= serving.MOST_PROMPT + serving.PREFIX
    assert max(r.answer for r in load) == serving.MOST_ANSWER
    begun = [tuple(r.prompt[:64]) for r in load if len(r.prompt) > 64]
    assert len(set(begun)) < len(begun) / 2
    with pytest.raises(UserError, match="390 blocks of text for 391 requests.*--requests"):
        serving.requests(str(tmp_path), 391, 0)


def test_arrivals_are_a_poisson_process():
    gaps = np.diff(serving.arrivals(4000, 5.0, 0), prepend=0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)  # an exponential's deviation is its mean
    assert not serving.arrivals(3, np.inf, 0).any()


def test_padded_batches_are_rectangles():
    first, second = serving.batches(LOAD, 3, padded=True)
    assert [(len(r.prompt), r.answer) for r in first] == [(20, 9)] * 3
    assert first[0].prompt == [0] * 17 + [1, 2, 3]
    assert second == LOAD[3:]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_serves_all_and_counts_what_was_asked_for(engine, mode):
    times = np.array([0.0, 0.0, 0.02, 0.05])
    row = serving.serve(engine, LOAD, mode, times, 3)
    assert row["tokens"] == 17 and row["tokens_per_s"] == pytest.approx(17 / row["seconds"])
    assert 0 < row["first_token_s_p50"] <= row["request_s_p50"] <= row["request_s_p99"]
    assert not engine.busy and engine.pool.in_use == 0
    # A static batch of 3 waits for its longest answer, then comes the fourth request.
    least = {"static": 9 + 1, "static, padded": 9 + 1}.get(mode, 9)
    assert row["steps"] >= least


@pytest.mark.slow
@pytest.mark.process
def test_the_smallest_preset_writes_its_rows_and_figure(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join("word " * n for n in range(2, 40)))
    ask = f"--data={tmp_path}/text", f"--out={tmp_path}/out", "--requests=12"
    for _ in range(2):  # a second run measures anew
        done = experiment(*ask)
        assert done.returncode == 0, done.stderr
        assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".json", ".svg", ".png"}
        rows = json.loads((tmp_path / "out" / "serving.json").read_text())["rows"]
        assert [r["mode"] for r in rows if r["part"] == "offline"] == list(MODES)
        assert {r["part"] for r in rows} == {"offline", "online", "numerics", "claim"}


@pytest.mark.process
def test_wrong_flags_are_one_line(tmp_path):
    done = experiment("--loads=fast", f"--out={tmp_path}/never")
    assert done.returncode == 2
    assert done.stderr.startswith("error: loads=fast must be numbers above 0 and below 1000")
    assert not list(tmp_path.iterdir())
