"""Bytes and counts of the collectives of a training step."""
