"""Mesh-aware execution: the rule tables, and Ops with communication in them."""
