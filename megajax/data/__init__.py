"""Text to batches: sources, tokenizers, the packed index, the loader."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "config": ("DataConfig",),
        "corpus": ("Corpus", "open_corpora"),
        "indexed": ("TokenFile", "TokenWriter"),
        "loader": ("Loader", "training_rows"),
        "pack": (
            "PackedRows",
            "MixedRows",
        ),
        "source": ("Document", "Source", "open_source"),
        "tokenizer": ("Tokenizer", "open_tokenizer", "train_bpe"),
    },
)
