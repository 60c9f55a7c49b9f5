"""A real chat model behind the HTTP server, asked by OpenAI's client, against NumPy."""

import concurrent.futures
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megajax.foreign import gguf
from tests.llama_oracle import Llama
from tests.serving.test_smollm2 import END, QUESTIONS, chat

pytestmark = [pytest.mark.slow, pytest.mark.process]
ROOT = Path(__file__).parent.parent.parent.parent
TOKENS = 10


@pytest.fixture
def address(smollm2):
    """Where a server of the model answers."""
    command = [sys.executable, "scripts/serve.py", f"--gguf={smollm2}", "--port=0", "--max_batch=4"]
    command += ["--dtype=float32", "--context=256"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        yield next(m[0] for line in lines if (m := re.search(r"http://\S+/v1", line)))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.stdout.close()


def greedy(model, prompts):
    """The likeliest next tokens, one forward pass of all rows for each; a row ends with END."""
    rows = [list(p) for p in prompts]
    for _ in range(TOKENS):
        live = [row for row, p in zip(rows, prompts, strict=True) if END not in row[len(p) :]]
        for row, logits in zip(live, model.logits(live) if live else [], strict=True):
            row.append(int(logits[-1].argmax()))
    return [row[len(p) :] for row, p in zip(rows, prompts, strict=True)]


def test_chats_are_answered_as_numpy_would(smollm2, address):
    import openai

    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=600)
    (model,) = client.models.list().data
    assert model.id == smollm2.name

    def ask(question):
        messages = [{"role": "user", "content": question}]
        return client.chat.completions.create(
            model=model.id, messages=messages, max_tokens=TOKENS, temperature=0
        )

    questions = QUESTIONS[:4]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, questions))
    tokenizer = gguf.GgufModel(smollm2).tokenizer()
    prompts = [chat(tokenizer, q) for q in questions]
    for prompt, answer, ids in zip(prompts, answers, greedy(Llama(smollm2), prompts), strict=True):
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(ids)
        assert answer.choices[0].message.content == tokenizer.decode(ids)
        assert answer.choices[0].finish_reason == ("stop" if ids[-1] == END else "length")
