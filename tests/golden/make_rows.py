"""Makes tests/golden/rows.json: rows of a classifier as transformers' tokenizers make and cut them.

Run it in an environment of its own (it needs transformers, which megajax does not have):

    python -m venv hf && hf/bin/pip install torch transformers
    hf/bin/python tests/golden/make_rows.py

Per family it holds a tiny tokenizer.json, the files beside it, texts, and for each length what
`tokenizer(text, truncation=True, max_length=length)` gives. Made with transformers 5.24.0.
"""

import json
import pathlib
import tempfile

import transformers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "##s", "a"]
TEXTS = ["the cat sat on the mats", "a cat", "", "the cats sat on a mat the cat sat on a mat"]
LENGTHS = (3, 5, 8, 64)


def main() -> None:
    """Writes the file."""
    bert = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "\u0120")})
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters, "\u0120t", "\u0120th"]
    roberta = transformers.RobertaTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("\u0120", "t"), ("\u0120t", "h")],
    )
    golden = {"bert": rows(bert), "roberta": rows(roberta)}
    path = pathlib.Path(__file__).parent / "rows.json"
    path.write_text(json.dumps(golden, indent=1) + "\n")


def rows(tokenizer: transformers.PreTrainedTokenizerBase) -> dict:
    """Returns the files of a tokenizer, and its rows."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {file.name: file.read_text() for file in pathlib.Path(folder).iterdir()}
    cut = {
        length: [tokenizer(t, truncation=True, max_length=length)["input_ids"] for t in TEXTS]
        for length in LENGTHS
    }
    return {"files": files, "texts": TEXTS, "rows": cut}


if __name__ == "__main__":
    main()
