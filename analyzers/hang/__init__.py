"""Analysis of a hang from torch's Flight Recorder dumps."""
