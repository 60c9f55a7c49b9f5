"""Variable-length attention over packed tokens: forward, backward, log-sum-exp."""
