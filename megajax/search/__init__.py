"""Searches over plain numbers: no models, no arrays of a device."""
