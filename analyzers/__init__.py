"""Pure functions from tables to results: the breakdown of a step, the contents of memory, and their
causes."""
