"""Ground floor: configuration, mesh, layout, trees of arrays, hardware cards."""
