"""Saving and loading: run checkpoints through Orbax, Hugging Face folders, safetensors."""
