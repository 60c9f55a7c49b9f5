"""megajax trains, plans, checkpoints, watches and serves large models in JAX on NVIDIA GPUs.

The floors, from the ground up (imports go down only; tests/test_architecture.py enforces it):
core -> cost, schedule, quant, search -> layers -> models -> parallel -> serving, data,
checkpoint, monitor -> training -> systems -> experiments.
"""
