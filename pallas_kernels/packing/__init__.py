"""Packed tokens: sequences end to end on one axis, without padding."""
