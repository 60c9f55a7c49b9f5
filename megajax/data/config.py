"""What text a run reads and how it becomes tokens."""

from dataclasses import dataclass
from typing import Literal

from megajax.core.config import Checked, option


@dataclass(frozen=True)
class DataConfig(Checked, section="data"):
    """Source, tokenizer and hold-out."""

    source: str = option(
        "stdlib",
        "stdlib, site-packages, a folder, a glob, a file (txt md py jsonl json parquet arrow, .gz "
        ".zst), a Megatron prefix (x.bin with x.idx), or a mixture a:0.7,b:0.3 of names without "
        "commas",
    )
    tokenizer: str = option("bytes", "bytes, bpe:N (trained here, cached), or a tokenizer.json")
    holdout: float = option(
        0.05, "fraction of documents held out, by hash of their content", at_least=0, below=1
    )
    hash_gib: float = option(
        16.0,
        "largest .bin file, among those that scripts/tokenize.py did not write, whose documents "
        "are hashed to choose the held-out ones; of a larger file they are chosen by their "
        "numbers",
        "GiB",
        at_least=0,
    )
    undecodable: Literal["error", "skip", "replace"] = option(
        "error", "what to do with bytes that are not UTF-8"
    )
    text_key: str = option("text", "the member (of jsonl, json) or column that holds the text")
    prefetch: int = option(4, "batches that threads prepare ahead", "batches", at_least=0)


@dataclass(frozen=True)
class LabelledConfig(DataConfig, section="data"):
    """Source, tokenizer and hold-out of text that may have labels."""

    source: str = option(
        "stdlib",
        "what pretraining reads; to classify: stdlib (passages and their packages), jsonl lines "
        "with text and label, or a folder with a folder of texts for each label",
    )
    label_key: str = option("label", "the member or column that holds the label")
