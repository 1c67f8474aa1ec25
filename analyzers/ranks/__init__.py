"""Ranks against each other: matched collectives, clocks, waits, and who caused them."""
