"""What text a run reads and how it becomes tokens."""

from dataclasses import dataclass
from typing import Literal

from megajax.core.config import option
from megajax.core.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """Source, tokenizer and hold-out."""

    source: str = option(
        "stdlib",
        "stdlib, site-packages, a folder, a glob, a file (txt md py jsonl, .gz), a Megatron prefix "
        "(x.bin with x.idx), or a mixture a:0.7,b:0.3",
    )
    tokenizer: str = option("bytes", "bytes, bpe:N (trained here, cached), or a tokenizer.json")
    holdout: float = option(0.05, "fraction of documents held out, by hash of their path")
    undecodable: Literal["error", "skip", "replace"] = option("error", "what to do with non-UTF-8")
    text_key: str = option("text", "the member of a jsonl line that holds the text")
    prefetch: int = option(4, "batches prepared ahead, by threads", "batches")

    def __post_init__(self):
        """Refuses fractions outside [0, 1)."""
        if not 0.0 <= self.holdout < 1.0:
            raise UserError(f"data.holdout={self.holdout} must be in [0, 1) (--data.holdout)")
