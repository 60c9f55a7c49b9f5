"""Whole networks and their name maps. They know no mesh and no PartitionSpec."""
