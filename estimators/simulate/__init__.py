"""One step of one rank as a program of commands: extended to depth and micro-batches, simulated."""
