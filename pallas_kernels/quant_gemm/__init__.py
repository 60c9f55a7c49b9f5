"""A matrix product of floating activations and weights of a few bits."""
