"""Normalisation fused with what comes before it: bias and residual."""
