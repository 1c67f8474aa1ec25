"""Snapshots and recordings of allocations to tables."""
