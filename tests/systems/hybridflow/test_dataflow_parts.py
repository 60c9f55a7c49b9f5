"""Batches, pools of workers, packed rows, rewards and prompts."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import warnings

import jax
import numpy as np
import pytest

from megajax.core.mesh import MeshSpec
from megajax.systems.hybridflow import (
    DataBatch,
    ResourcePool,
    WorkerGroup,
    packing,
    register,
    register_protocol,
    tasks,
)
from megajax.systems.hybridflow import data as data_
from megajax.systems.hybridflow import rewards as rewards_
from megajax.systems.hybridflow.controller import mean_metrics
from tests.systems.hybridflow import reward_functions as functions


def rows(n=5):
    return DataBatch({"x": np.arange(n), "name": [f"r{i}" for i in range(n)]})


def test_batches():
    batch = rows()
    assert len(batch) == 5 and batch["name"][2] == "r2" and list(batch) == ["x", "name"]
    with pytest.raises(KeyError, match="no column 'y'.*name"):
        batch["y"]
    with pytest.raises(KeyError):
        batch.select(["y"])
    assert list(batch.select(["x"])) == ["x"]
    more = DataBatch({"y": list(range(5))})
    assert set(batch.union(more)) == {"x", "name", "y"}
    with pytest.raises(ValueError, match="'x'"):
        batch.union(DataBatch({"x": np.zeros(5)}))
    assert batch.repeat(2)["name"][:4] == ["r0", "r0", "r1", "r1"]
    np.testing.assert_array_equal(batch.repeat(2, interleave=False)["x"], [*range(5)] * 2)
    padded, added = batch.pad(4)
    assert len(padded) == 8 and added == 3 and padded["name"][5:] == ["r0", "r1", "r2"]
    assert padded.unpad(added)["name"] == batch["name"]
    assert [len(p) for p in padded.chunk(4)] == [2, 2, 2, 2]
    joined = DataBatch.concatenate(padded.chunk(2))
    np.testing.assert_array_equal(joined["x"], padded["x"])
    for call in (
        lambda: batch.chunk(2),
        lambda: DataBatch({}),
        lambda: DataBatch({"a": [1], "b": [1, 2]}),
        lambda: DataBatch({"a": np.float32(1)}),
        lambda: batch.repeat(0),
        lambda: batch.unpad(6),
        lambda: rows(0).pad(2),
        lambda: DataBatch.concatenate([]),
        lambda: DataBatch.concatenate([batch, more]),
        lambda: batch.repeat(1.5),
        lambda: batch.take(np.arange(5) > 2),
    ):
        with pytest.raises(ValueError):
            call()
    for column in (np.arange(5), jax.numpy.arange(5), list(range(5))):
        with pytest.raises(IndexError, match="no row .5."):
            DataBatch({"x": column}).take([5])
    with pytest.raises(ValueError, match="column 'x'"):
        DataBatch.concatenate([DataBatch({"x": np.zeros((1, n))}) for n in (2, 3)])


class Doubler:
    def __init__(self, factor=2, rank=0):
        self.factor, self.rank = factor, rank

    @register("data")
    def double(self, batch, plus=0):
        return DataBatch(
            {"x": batch["x"] * self.factor + plus, "rank": np.full(len(batch), self.rank)}
        )

    @register("data")
    def answers(self, batch):
        return DataBatch({"x": batch.repeat(3)["x"]})

    @register("data")
    def unlike(self, batch):  # as many rows as there were, but not of each rank
        return batch.repeat(2) if self.rank == 0 else batch.take([]) if self.rank == 1 else batch

    @register("data")
    def pair(self, batch):
        return batch["x"], batch["x"]

    @register("one")
    def first(self):
        return self.rank

    @register("all")
    def every(self, word):
        return f"{word}{self.rank}"

    @register("one")
    def sleep(self, seconds):
        time.sleep(seconds)
        return threading.get_ident()

    @register("one")
    def fail(self):
        raise RuntimeError("no weights")


def test_groups_of_workers():
    devices = jax.devices()
    with ResourcePool(devices[:4]) as pool:
        group = WorkerGroup(pool, Doubler, factor=3)
        doubled = group.double(rows(10), plus=1).result()
        np.testing.assert_array_equal(doubled["x"], 3 * np.arange(10) + 1)
        np.testing.assert_array_equal(doubled["rank"], np.repeat([0, 1, 2, 3], 3)[:10])
        chained = group.double(group.double(rows(5))).result()  # a future goes in
        np.testing.assert_array_equal(chained["x"], 9 * np.arange(5))
        np.testing.assert_array_equal(
            group.answers(rows(5)).result()["x"], np.repeat(np.arange(5), 3)
        )
        assert group.first().result() == 0
        assert group.every("r").result() == ["r0", "r1", "r2", "r3"]
        with pytest.raises(ValueError, match="empty"):
            group.double(rows(0))
        with pytest.raises(ValueError, match=r"made \[6, 0, 3, 3\] rows of 3 on each rank"):
            group.unlike(rows(12)).result()
        with pytest.raises(ValueError, match="not tuple, tuple"):
            group.pair(rows(8)).result()
        with pytest.raises(AttributeError, match="double"):
            group.triple(rows())
        with pytest.raises(RuntimeError, match="no weights"):
            group.fail().result()
        with pytest.raises(ValueError, match="'broadcast'"):
            register("broadcast")
    with pytest.raises(ValueError, match="distinct"):
        ResourcePool([devices[0], devices[0]])


def test_a_class_gets_its_devices_and_a_configuration_of_any_names():
    class Held:
        made = 0

        def __init__(self, devices, pool):
            Held.made += 1
            self.devices, self.pool = devices, pool

        @register("all")
        def where(self):
            return self.devices, self.pool

    for count in (1, 3):
        devices = jax.devices()[:count]
        with ResourcePool(devices) as pool:
            where = WorkerGroup(pool, Held, pool="swimming").where().result()
        assert where == [((device,), "swimming") for device in devices]
    assert Held.made == 1 + (1 + 3)  # once with all, which says whether it has a mesh


def test_a_worker_with_a_mesh_is_called_once_for_all_rows():
    class Program:
        def __init__(self, devices):
            self.mesh = MeshSpec(data=4, tensor=2).build(devices)

        @register("data")
        def double(self, batch):
            assert len(batch) % 4 == 0
            cut = jax.NamedSharding(self.mesh, jax.P("data"))
            return DataBatch({"x": jax.device_put(np.asarray(batch["x"]), cut) * 2})

    with ResourcePool(jax.devices()) as pool:
        group = WorkerGroup(pool, Program)
        assert group.ranks == 4 and len(group.workers) == 1
        for n in (1, 4, 5):
            x = group.double(rows(n)).result()["x"]
            np.testing.assert_array_equal(x, 2 * np.arange(n))
        cut = group.workers[0].double(rows(8))  # on several devices
        for part in (cut.chunk(4)[1]["x"], cut.take([2, 3])["x"], cut.unpad(4)["x"][2:]):
            np.testing.assert_array_equal(part, [4, 6])


def test_pools_overlap_and_models_of_one_pool_do_not():
    devices = jax.devices()
    with ResourcePool(devices[:1]) as one, ResourcePool(devices[1:2]) as other:
        groups = [WorkerGroup(p, Doubler) for p in (one, one, other)]
        began = time.monotonic()
        threads = [f.result() for f in [g.sleep(0.3) for g in groups]]
        assert 0.6 <= time.monotonic() - began < 0.85
        assert threads[0] == threads[1] != threads[2]
        first, second, third = (g.take_timings()["sleep"] for g in groups)
        assert first.waiting < 0.15 and third.waiting < 0.15  # of pools of their own
        assert 0.29 <= second.waiting < 0.45 and 0.3 <= second.seconds < 0.45
        assert groups[1].take_timings() == {}


def test_metrics_of_parts_of_a_batch_are_weighed_by_rows():
    parts = [(3, {"reward/exact": 1.0, "format": 0.5}), (1, {"reward/exact": 0.0})]
    assert mean_metrics(parts) == {"reward/exact": 0.75, "reward/format": 0.5}


def test_a_protocol_of_ones_own():
    register_protocol(
        "round", lambda group, items: items, lambda group, results: sorted(results, reverse=True)
    )

    class Square:
        @register("round")
        def square(self, x):
            return x * x

    with ResourcePool(jax.devices()[:3]) as pool:
        group = WorkerGroup(pool, Square)
        assert group.square([1, 2, 3]).result() == [9, 4, 1]
        assert group.square([1, 2]).result() == [4, 1]
        with pytest.raises(ValueError, match="'round' gave 4 calls for 3 workers"):
            group.square([1, 2, 3, 4])
    with pytest.raises(ValueError, match="exists"):
        register_protocol("round", lambda group: [], lambda group, results: None)


def test_packed_rows_are_balanced_and_whole():
    random = np.random.default_rng(0)
    prompts = [list(random.integers(5, 90, random.integers(1, 5))) for _ in range(20)]
    answers = [list(random.integers(5, 90, random.integers(1, 8))) for _ in range(20)]
    column = [random.random(len(a)).astype(np.float32) for a in answers]
    batch = packing.pack(prompts, answers, {"old": column}, 8, 32)
    assert {x.shape for x in batch.values()} == {(8, 32)}
    columns = {}
    for row in range(8):
        for segment in np.unique(batch["segments"][row]):
            at = np.flatnonzero(batch["segments"][row] == segment)
            np.testing.assert_array_equal(batch["positions"][row, at], np.arange(len(at)))
            targets = batch["targets"][row, at]
            if (targets >= 0).any():
                first = np.argmax(targets >= 0)
                prompt = [*batch["tokens"][row, at[: first + 1]]]
                columns[tuple(prompt), tuple(targets[first:])] = batch["old"][row, at[first:]]
    assert len(columns) == 20
    for prompt, answer, numbers in zip(prompts, answers, column, strict=True):
        np.testing.assert_array_equal(columns[tuple(prompt), tuple(answer)], numbers)
    used = (batch["targets"] >= 0).sum(1)
    assert used.max() - used.min() <= 8
    with pytest.raises(ValueError, match="do not fit.*train.global_batch"):
        packing.pack(prompts, answers, {}, 1, 32)
    with pytest.raises(ValueError, match="prompt 1 has no token"):
        packing.pack([[1], []], [[2], [3]], {}, 1, 32)


# ---- rewards


def scored(n=3):
    return DataBatch(
        {
            "prompts": ["p"] * n,
            "completions": list("abc"[:n]),
            "ground_truth": ["a"] * n,
            "data_source": ["s"] * n,
            "uid": [f"u{i}" for i in range(n)],
        }
    )


def test_both_signatures_and_weights():
    both = [functions.verl, functions.trl]
    scores, metrics = rewards_.score(both, scored(), [1.0, 0.5])
    np.testing.assert_allclose(scores, [1.5, 0.5, 0.5])
    assert scores.dtype == np.float32
    assert metrics["reward/verl"] == pytest.approx(1 / 3) and metrics["length"] == 1
    timed, same = rewards_.score(both, scored(), [1.0, 0.5], timeout=60)
    np.testing.assert_array_equal(timed, scores)
    assert same == metrics


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hang", "reward hang on row 1 .uid u1.: no answer within 0.5 s"),
        ("spin", "reward spin on row 1 .uid u1.: no answer within 0.5 s"),
        ("die", "reward die on row 0 .uid u0.: .*exit code 3"),
        ("fail", "reward fail on row 0 .uid u0.: KeyError"),
        ("nan", "reward nan on row 0 .uid u0.: .*finite number is needed, not nan"),
        ("text", "reward text on row 0 .uid u0.: .*a number is needed, not str"),
        ("short", "reward short on row 0 .*for 3 completions"),
        ("no_score", "reward no_score on row 0 .*without 'score'"),
        ("odd", r"reward odd on row 0 .uid u0.: Odd: odd error \(reward_functions.py, line \d+\)$"),
        ("leave", r"reward leave on row 0 .uid u0.: it called sys.exit\(3\)"),
        ("large", r"reward large on row 0 .*finite number is needed, not 1e\+300"),
    ],
)
def test_rewards_that_fail_say_whose_fault_it_is(name, words):
    with pytest.raises(ValueError, match=words):
        rewards_.score([getattr(functions, name)], scored(), timeout=0.5)


def test_rows_with_errors_can_be_left_out():
    with rewards_.Scorer([functions.hang], timeout=0.5) as scorer:
        scores, metrics, errors = scorer.score(scored())
    np.testing.assert_array_equal(np.isnan(scores), [False, True, False])
    assert [*errors] == [1] and metrics["reward/hang"] == 1


def test_after_the_first_error_nothing_is_called():
    def count(data_source, solution_str, ground_truth):
        calls.append(solution_str)
        return math.nan if solution_str == "b" else 1.0

    for stops, want in ((True, ["a", "b"]), (False, ["a", "b", "c"])):
        calls = []
        scores, _, errors = rewards_.Scorer([count]).score(scored(), stops)
        assert calls == want and [*errors] == [1] and np.isnan(scores).all() == stops


def test_a_row_with_an_error_counts_in_no_metric():
    both = [functions.verl, functions.only_short]
    unlike = DataBatch(dict(scored()) | {"completions": ["a", "bb", "c"]})
    with rewards_.Scorer(both) as scorer:
        scores, metrics, errors = scorer.score(unlike)
    assert [*errors] == [2] and np.isnan(scores[2])
    assert metrics["length"] == 1.5 and metrics["reward/verl"] == 0.5


def test_numbers_of_jax_are_numbers():
    scores, metrics = rewards_.score([functions.arrays, functions.arrays_of_all], scored())
    np.testing.assert_array_equal(scores, [0.5, 1.5, 2.5])
    assert metrics["length"] == 3 and "text" not in metrics


def test_sys_exit_in_a_function_ends_no_run():
    with pytest.raises(rewards_.RewardError, match="sys.exit"):
        rewards_.score(functions.leave, scored())


def running(number):
    """Whether a process exists that has not ended."""
    try:
        return pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_the_end(*numbers):
    """Waits until processes have ended."""
    deadline = time.monotonic() + 30
    while any(map(running, numbers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_late_function_started_ends_with_it(tmp_path):
    path = tmp_path / "numbers"
    with pytest.raises(rewards_.RewardError, match="no answer within 1 s"):
        rewards_.score(functions.starts_another, one_row(path), timeout=1)
    wait_for_the_end(*path.read_text().split())


def one_row(path):
    return {"data_source": ["s"], "completions": ["c"], "ground_truth": [str(path)]}


def test_what_a_function_prints_is_bounded_and_what_it_starts_ends(capsys):
    with rewards_.Scorer([functions.loud], timeout=60) as scorer:
        pids, _, errors = scorer.score(scored(1))
        out, deadline = "", time.monotonic() + 30
        while "is left out" not in out:
            assert not errors and time.monotonic() < deadline
            out += capsys.readouterr().out
    assert out.count("x") == rewards_.PRINTED
    wait_for_the_end(int(pids[0]))


@pytest.mark.process
def test_processes_of_rewards_end_with_their_run(tmp_path):
    path = tmp_path / "numbers"
    source = (
        "from megajax.systems.hybridflow import rewards\n"
        "from tests.systems.hybridflow import reward_functions\n"
        f"rewards.score(reward_functions.starts_another, {one_row(path)}, timeout=100)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", source], cwd=pathlib.Path(__file__).parents[3])
    try:
        while not path.exists() or len(path.read_text().split()) < 2:
            assert run.poll() is None
            time.sleep(0.05)
    finally:
        run.kill()
        run.wait()
    wait_for_the_end(*path.read_text().split())


def test_functions_that_cannot_be_called_are_refused():
    for call, words in (
        (lambda: rewards_.score([lambda x: 1], scored()), "needs .data_source"),
        (lambda: rewards_.score([], scored()), "at least one"),
        (lambda: rewards_.score([functions.verl], scored(), [1, 2]), "weights"),
        (lambda: rewards_.score([functions.verl], scored(), timeout=0), "timeout=0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_functions_of_a_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def f(data_source, solution_str, ground_truth):\n    return len(solution_str)\n"
    )
    scores, _ = rewards_.score(rewards_.open_rewards(f"{file}:f"), scored(), timeout=60)
    np.testing.assert_array_equal(scores, [1, 1, 1])
    for flag, words in (
        (f"{file}:g", r"functions \['f'\]"),
        ("f", "FILE.py:FUNCTION"),
        (f"{tmp_path}/none.py:f", "no Python file"),
        (f"{tmp_path}/exits.py:f", r"the file fails: SystemExit: 3 \(exits.py, line 1\)"),
    ):
        (tmp_path / "exits.py").write_text("raise SystemExit(3)")
        with pytest.raises(ValueError, match=words):
            rewards_.open_rewards(flag)


# ---- prompts


def test_files_of_prompts(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i} + 1"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": "train"},
            "ability": "math",
        }
        for i in range(40)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    batch = data_.read(file)
    assert len(batch) == 40 and batch["ground_truth"][3] == "4" and batch["ability"][0] == "math"
    prompts = data_.Prompts(batch, 0, 0.2, "rows", lambda prompt: [1], 8)
    texts = {part: set() for part in (False, True)}
    for part in texts:
        size = 40 if not part else prompts.held_out(100)
        texts[part] = {json.dumps(p) for p in prompts.rows(0, size, part)["prompts"]}
    assert texts[False] and texts[True] and not texts[False] & texts[True]
    assert prompts.rows(3, 2)["uid"] == prompts.rows(0, 5)["uid"][3:]
    for text, words in (
        ("[1]", "row 0: a row is an object"),
        ('{"prompt": 3}', "row 0: `prompt` must be"),
        ('{"prompt": ""}', "row 0: `prompt` is empty"),
        ('{"prompt": "\\ud800"}', "row 0: .* half of a surrogate pair"),
        ('{"prompt": "a", "extra_info": "b"}', "row 0: `extra_info` must be an object, not str"),
        ('{"prompt": "a", "scores": 1}', "the member 'scores', which an iteration makes"),
        ('{"prompt": [{"role": "user"}]}', "row 0: `prompt` is a text or a list"),
        ('{"prompt": [{"role": 3, "content": "a"}]}', "row 0: `prompt` is a text or a list"),
        ("{", "row 0"),
        ("", "has no rows"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            data_.read(file)
    with pytest.raises(ValueError, match="must be a .jsonl"):
        data_.read(tmp_path / "rows.csv")
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(ValueError, match="only regular files are read|needs `uv sync"):
        data_.read(tmp_path / "pipe.parquet")


def test_members_without_a_value_have_their_defaults(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "data_source": null, "uid": null, "extra_info": null}')
    batch = data_.read(file)
    assert {name: batch[name][0] for name in batch} == {
        "prompts": "a",
        "data_source": "",
        "uid": "rows.jsonl:0",
        "extra_info": {},
        "ground_truth": None,
    }


def test_prompts_that_are_too_long_are_left_out_of_files_and_of_tasks():
    """A token a character."""
    task = tasks.open_task("arithmetic")
    batch = DataBatch(
        {
            "prompts": [task.row(0, i, False, 0.2)["prompts"] for i in range(64)],
            "ground_truth": [None] * 64,
        }
    )
    lengths = [len(prompt) for prompt in batch["prompts"]]
    assert {*lengths} >= {5, 6}
    for source, what in ((batch, "64 prompts"), (task, "the first 64 prompts")):
        prompts = data_.Prompts(source, 0, 0.2, "sums", list, 5)
        left_out = sum(n > 5 for n in lengths)
        assert prompts.notes[0].startswith(f"{left_out} of {what} have more than 5 tokens")
        for part in (False, True):
            rows = prompts.rows(0, 40, part)
            assert max(map(len, rows["prompts"])) == 5
            assert rows["prompt_ids"] == [*map(list, rows["prompts"])]
        words = f"none of {what} has 1 to rl.max_prompt=2 tokens; the shortest has "
        with pytest.raises(ValueError, match=words):
            data_.Prompts(source, 0, 0.2, "sums", list, 2)
        with pytest.raises(ValueError, match=words + "1 "):
            data_.Prompts(source, 0, 0.2, "sums", lambda prompt: [], 2)
    few = data_.Prompts(batch, 0, 0.2, "sums", list, 6).notes
    assert few == ["64 of 64 rows have no ground_truth: a reward gets None"]


def test_programs_are_scored_by_their_tests():
    row = tasks.open_task("python").row(1, 0, False, 0.2)
    number = re.search(r"# (\d+) times x", row["prompts"])
    assert number, "row 0 of seed 1 is a product"
    for body, score in (
        (f"    return {number[1]} * x", 1),
        ("    return x", 0),
        ("    import os; os._exit(0)", 0),
        ("    pass\nimport sys; sys.exit(0)", 0),
    ):
        batch = {name: [row[name]] for name in ("data_source", "ground_truth", "extra_info")}
        scores, _ = rewards_.score(tasks.score_python, batch | {"completions": [body]})
        assert scores == [score], body


@pytest.mark.parametrize("name", ["copy:3", "sort:4", "arithmetic", "countdown", "python"])
def test_tasks_are_pure_and_hold_out_by_content(name):
    task = tasks.open_task(name)
    train = [task.row(1, i, False, 0.2) for i in range(60)]
    held = [task.row(1, i, True, 0.2) for i in range(60)]
    assert task.row(1, 7, False, 0.2) == train[7]
    assert not {r["prompts"] for r in train} & {r["prompts"] for r in held}
    if not task.is_text:
        assert set("".join(r["prompts"] for r in train)) <= set(tasks.ALPHABET)
    if isinstance(train[0]["ground_truth"], str) and name != "python":
        row = train[0]
        assert task.reward(name, row["ground_truth"], row["ground_truth"])["score"] == 1


def test_scores_of_tasks():
    right = tasks.score_characters("", "123", "123")
    assert right == {"score": 1.0, "exact": 1.0}
    assert tasks.score_characters("", "1234", "123")["score"] == 0.75
    assert tasks.score_characters("", "", "123")["score"] == 0
    truth = {"numbers": [3, 4, 5], "target": 35}
    for text, score in (
        ("(3+4)*5", 1.0),
        ("3+4", 0.1),
        ("3+4+4", 0.0),
        ("7*5", 0.0),
        ("3**4", 0.0),
        ("__import__('os')", 0.0),
        ("3/(4-4)", 0.0),
        ("(" * 200, 0.0),
        ("3or 4", 0.0),
    ):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert tasks.score_countdown("", text, truth)["score"] == score, text
        assert not warned
    prompt = {"prompt": "def f(x):\n"}
    assert tasks.score_python("", "    return x*x", "assert f(3) == 9", prompt)["score"] == 1
    assert tasks.score_python("", "    return x", "assert f(3) == 9", prompt)["score"] == 0
    for way_out in ("raise SystemExit", "import sys\nsys.exit(0)", "import os\nos._exit(0)"):
        answer = f"    return x\n{way_out}"
        assert tasks.score_python("", answer, "assert f(3) == 9", prompt)["score"] == 0, way_out
    with pytest.raises(ValueError, match="copy:99"):
        tasks.open_task("copy:99")
    with pytest.raises(ValueError, match="Did you mean countdown"):
        tasks.open_task("countdow")
