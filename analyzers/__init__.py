"""Pure functions from tables to results: where a step goes, what fills memory, and why."""
