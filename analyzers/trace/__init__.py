"""One rank's trace: its step, its collectives by layer, who waits for them, why nothing ran."""
