"""Public names of Hugging Face folders, which megajax/foreign/hf.py reads and writes."""

from megajax.foreign.hf import load, load_config, load_labels, load_params, save

__all__ = ["load", "load_config", "load_labels", "load_params", "save"]
