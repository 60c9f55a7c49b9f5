"""Training: configuration, optimizers, the one train step, evaluation, and the loop around them."""
