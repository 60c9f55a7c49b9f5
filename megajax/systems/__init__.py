"""Compositions: parts of the library put together for one purpose."""
