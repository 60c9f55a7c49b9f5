"""Files of other projects, read without running what they hold, within limits of memory and time.

Hugging Face folders, quantized ones, safetensors, GGUF, torch.save, torch.distributed.checkpoint
and Megatron. Public names of two of them: megajax.checkpoint.hf and megajax.checkpoint.gguf.
"""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "readers": ("detect", "open_foreign"),
    },
)
