"""Text and annotated images to batches: sources, tokenizers, rows, the loader."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "config": ("DataConfig",),
        "corpus": ("Corpus", "open_corpora"),
        "detection": ("Dataset", "Example", "open_detection"),
        "detection_rows": ("DetectionRows",),
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
