"""megajax trains, plans, checkpoints and watches large models in JAX on NVIDIA GPUs.

The floors, from the ground up (imports go down only; tests/test_architecture.py enforces it):
core -> cost, schedule, search -> layers -> models -> parallel -> serving, data,
checkpoint, monitor -> training -> systems -> experiments.
"""

__version__ = "0.1.0"
