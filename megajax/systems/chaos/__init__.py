"""A supervised job among faults that come from outside, and the account of it."""
