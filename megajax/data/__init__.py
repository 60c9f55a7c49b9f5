"""Text to batches: sources, tokenizers, the packed index, the loader."""
