"""Formats of others, read without running what a file holds, within budgets of memory and time."""
