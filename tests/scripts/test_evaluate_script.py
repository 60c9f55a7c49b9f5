"""scripts/evaluate.py on a small GGUF file."""

import json

import numpy as np
import pytest

from tests import forks, task_files
from tests import gguf_writer as w
from tests.systems import test_encoder_server


@pytest.fixture
def place(tmp_path):
    tensors = w.llama_tensors(np.random.default_rng(0))
    (tmp_path / "m.gguf").write_bytes(w.gguf(w.llama() | w.vocabulary(), tensors))
    rows = [{"prompt": "a", "choices": ["b", "cd"], "answer": i % 2} for i in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": "a", "target": "b"}] * 3
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.txt").write_text("some text, " * 20)
    return tmp_path


@pytest.mark.slow
@pytest.mark.process
def test_a_table_is_printed_and_continued(place):
    def run(tasks, *flags):
        tasks = ",".join(str(place / name) for name in tasks)
        words = f"--gguf={place / 'm.gguf'}", f"--tasks={tasks}", f"--out={place / 'out.json'}"
        return forks.run("scripts/evaluate.py", *words, f"--cache_dir={place}", *flags)

    done = run(["a.jsonl"], f"--texts={place / 't.txt'}")
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ")[0:1] + line.split()[-1:] for line in done.stdout.splitlines()[2:]]
    assert lines == [["t.txt", "219"]] * 3 + [["a.jsonl", "5"]] * 2
    before = json.loads((place / "out.json").read_text())["results"]
    done = run(["a.jsonl", "b.jsonl"])
    after = json.loads((place / "out.json").read_text())["results"]
    assert done.returncode == 0 and after[:-1] == before
    assert (after[-1]["metric"], after[-1]["n"]) == ("exact_match", 3)
    done = run(["a.jsonl"], "--few_shot=1")
    assert done.returncode == 2 and "has results of another command" in done.stderr


@pytest.mark.process
def test_a_wrong_line_is_refused_before_the_model_is_read(place):
    (place / "a.jsonl").write_text('\n{"prompt": "a", "choices": ["b", "c"], "answer": 2}\n')
    done = forks.run("scripts/evaluate.py", "--gguf=none", f"--tasks={place / 'a.jsonl'}")
    assert done.returncode == 2 and "a.jsonl, line 2: answer=2 must be" in done.stderr


@pytest.mark.slow
@pytest.mark.process
def test_a_classifier_is_judged_on_labelled_texts(tmp_path):
    folder, file = test_encoder_server.save(tmp_path / "model"), tmp_path / "set.jsonl"
    truth = ["good", "bad", "good", "fair"]
    rows = [{"text": f"text {i}", "label": label} for i, label in enumerate(truth)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--hf={folder}", f"--tasks={file}", f"--cache_dir={tmp_path}"
    done = forks.run("scripts/evaluate.py", *flags, f"--out={tmp_path / 'out.json'}")
    assert done.returncode == 0, done.stderr
    encoder = test_encoder_server.open_encoder(hf=str(folder)).load()
    chances = encoder([encoder.row(row["text"])[0] for row in rows])
    answers = [encoder.labels[i] for i in chances.argmax(-1)]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    values = {row["metric"]: (row["value"], row["n"]) for row in results}
    right = [a == t for a, t in zip(answers, truth, strict=True)]
    expected = {"acc": (sum(right) / 4, 4)}
    for label in encoder.labels:
        if n := truth.count(label):
            both = sum(a == t == label for a, t in zip(answers, truth, strict=True))
            expected[f"recall {label}"] = both / n, n
        if n := answers.count(label):
            both = sum(a == t == label for a, t in zip(answers, truth, strict=True))
            expected[f"precision {label}"] = both / n, n
    assert values == expected
    file.write_text('{"text": "x", "label": "superb"}\n')
    done = forks.run("scripts/evaluate.py", *flags)
    assert done.returncode == 2 and "one of its 3 labels: bad, fair, good" in done.stderr


def test_generated_tasks_have_their_answers():
    for make in (task_files.names, task_files.modules, task_files.sums):
        assert make(3) == make(3) and len(make(3)) == 3
    row = task_files.sums(1)[0]
    left, right = row["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:").split(" + ")
    assert int(row["target"]) == int(left) + int(right)
