"""Filled in by its part."""
