"""The ledger of lost time: every nanosecond of a step, charged to exactly one cause, with remedies."""
