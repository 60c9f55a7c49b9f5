"""megajax trains, plans, checkpoints and watches large models in JAX on NVIDIA GPUs.

The floors, from the ground up (imports go down only; tests/test_architecture.py enforces it):
core -> cost, schedule, search -> layers -> models -> parallel -> serving, data,
checkpoint, monitor -> training, evaluation -> systems -> llm -> experiments.
"""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(__name__, {"llm": ("LLM",)})

__version__ = "0.1.0"
