"""Pure arithmetic about programs and machines: FLOPs, and what a compiled module will do."""
