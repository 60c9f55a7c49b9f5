"""Generates with transformers from a folder of `scripts/hf.py export`, and prints what it found.

Run it in an environment of its own, as make_tokenizers.py:

    hf/bin/python tests/golden/check_export.py FOLDER PROMPT [TEXT ...]

Prints one JSON object: how generation ended, its text, the ids of each TEXT.
"""

import json
import os
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder, prompt, *texts):
    """Prints the object."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    ids.pop("token_type_ids", None)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=48, do_sample=False)[0].tolist()
    eos = model.generation_config.eos_token_id
    chat = tokenizer.chat_template and tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    answer = {
        "stopped": out[-1] in (eos if isinstance(eos, list) else [eos]),
        "text": tokenizer.decode(out, skip_special_tokens=True),
        "ids": [tokenizer(t)["input_ids"] for t in texts],
        "decoded": [
            tokenizer.decode(tokenizer(t)["input_ids"], skip_special_tokens=True) for t in texts
        ],
        "eos": eos,
        "tokenizer_eos": tokenizer.eos_token_id,
        "bos": tokenizer.bos_token_id,
        "chat": chat,
        "dtype": str(model.dtype),
        "files": sorted(p.name for p in pathlib.Path(folder).iterdir()),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main(*sys.argv[1:])
