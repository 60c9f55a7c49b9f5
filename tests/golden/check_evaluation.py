"""Evaluates a Hugging Face folder with transformers, in float32, and prints the numbers.

Run it in an environment of its own, as check_export.py:

    hf/bin/python tests/golden/check_evaluation.py FOLDER TEXT WINDOW STRIDE TASK.jsonl ...

Prints one JSON object: the nats of TEXT's tokens after the first, read in windows as transformers'
page on perplexity does, and how many they are; for each task the sum of the log-probabilities of
each choice. Tokens of a prompt and a choice: as `_encode_pair` of lm-evaluation-harness.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def windows(model, ids, window, stride):
    """Returns (sum of the losses, number of tokens) of transformers' loop over windows."""
    total, count, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : -(end - before)] = -100
        # The loss is a mean over the labels that a token precedes.
        counted = int((labels[:, 1:] != -100).sum())
        total += float(model(part, labels=labels).loss) * counted
        count, before = count + counted, end
        if end == ids.shape[1]:
            return total, count


def choice_sum(model, tokenizer, prompt, choice):
    """Returns the sum of the log-probabilities of a choice's tokens."""
    spaces = len(prompt) - len(prompt.rstrip())
    if spaces:
        prompt, choice = prompt[:-spaces], prompt[-spaces:] + choice
    both, first = tokenizer(prompt + choice)["input_ids"], len(tokenizer(prompt)["input_ids"])
    logits = model(torch.tensor([both]), logits_to_keep=len(both) - first + 1).logits[0]
    log_p = torch.log_softmax(logits.double(), -1)
    return sum(float(log_p[k, token]) for k, token in enumerate(both[first:]))


def main(folder, text, window, stride, *tasks):
    """Prints the object."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.set_num_threads(1)  # two threads of a busy machine wait for each other
    ids = tokenizer(pathlib.Path(text).read_text(), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        nats, tokens = windows(model, ids, int(window), int(stride))
        sums = {}
        for task in tasks:
            rows = [json.loads(line) for line in pathlib.Path(task).read_text().splitlines()]
            sums[pathlib.Path(task).stem] = [
                [choice_sum(model, tokenizer, row["prompt"], c) for c in row["choices"]]
                for row in rows
            ]
    print(json.dumps({"nats": nats, "tokens": tokens, "sums": sums}))


if __name__ == "__main__":
    main(*sys.argv[1:])
