"""A rank's allocations: counted, tagged, written."""
