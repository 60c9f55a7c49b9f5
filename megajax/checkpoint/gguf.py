"""Public name of the reader of GGUF files, megajax/foreign/gguf.py."""

from megajax.foreign.gguf import load

__all__ = ["load"]
