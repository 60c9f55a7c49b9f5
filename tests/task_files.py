"""Tasks made of what is installed everywhere, for comparisons with other programs.

    python tests/task_files.py FOLDER [ROWS]

writes FOLDER/names.jsonl (which of four names a character of Unicode has), FOLDER/modules.jsonl
(which module of the standard library a sentence documents), FOLDER/sums.jsonl (exact match), and a
task of lm-evaluation-harness for each of the first two.
"""

import functools
import json
import pathlib
import random
import re
import sys
import sysconfig
import unicodedata

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def names(count: int) -> list[dict]:
    """Returns rows about characters; that of a prompt is one of those that the choices name."""
    draw = random.Random(0)
    named = [(chr(c), n) for c in range(0x3000) if (n := unicodedata.name(chr(c), ""))]
    rows = []
    for _ in range(count):
        four, answer = draw.sample(named, 4), draw.randrange(4)
        prompt = f"The Unicode character {four[answer][0]} is named"
        rows.append({"prompt": prompt, "choices": [" " + n for _, n in four], "answer": answer})
    return rows


@functools.cache
def documented() -> dict[str, str]:
    """Returns the first line of the documentation of modules of the standard library."""
    known = {}
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        with open(path, encoding="utf-8", errors="replace") as file:
            said = re.search(r'^r?"""([A-Z].{20,100})$', file.read(2000), re.MULTILINE)
        if said and path.stem.isalpha():
            known[path.stem] = said[1].removesuffix('"""').strip()
    return known


def modules(count: int) -> list[dict]:
    """Returns rows about the first sentences of modules; spaces end the prompts."""
    draw, known = random.Random(1), documented()
    rows = []
    for _ in range(count):
        four, answer = draw.sample(sorted(known), 4), draw.randrange(4)
        prompt = f"Documentation: {known[four[answer]]}\nPython module: "
        rows.append({"prompt": prompt, "choices": four, "answer": answer})
    return rows


def sums(count: int) -> list[dict]:
    """Returns rows of exact match."""
    draw = random.Random(2)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(count)]
    return [{"prompt": f"Question: {a} + {b}\nAnswer:", "target": f" {a + b}"} for a, b in pairs]


def write(folder: pathlib.Path, count: int) -> None:
    """Writes the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (("names", names), ("modules", modules), ("sums", sums)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in make(count)))
        if name != "sums":
            (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file.resolve()))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
