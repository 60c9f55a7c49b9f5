"""Grouped products of a mixture of experts, fused with their communication."""
