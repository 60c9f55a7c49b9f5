"""Matrix products fused with their communication."""
