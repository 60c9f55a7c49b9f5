"""Numbers in few bits: the form in which gradients and weights travel between ranks."""
