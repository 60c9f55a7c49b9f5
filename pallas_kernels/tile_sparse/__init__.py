"""Matrix products with weights of which only some tiles are kept."""
