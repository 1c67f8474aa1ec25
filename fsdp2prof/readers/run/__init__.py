"""A run directory: its documents, nodes and ranks."""
