"""Pallas (Mosaic GPU) kernels for Hopper, and how to compile for it without one.

Imports jax, numpy and absl only; knows nothing of megajax.
"""
