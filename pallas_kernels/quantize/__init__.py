"""Numbers in few bits: what a gradient or a weight is on the wire."""
