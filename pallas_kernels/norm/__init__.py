"""Normalisation, fused with the addition of a bias and a residual before it."""
