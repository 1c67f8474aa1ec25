"""The input that a recorded run gives to an estimate: its policy, its collectives, its times."""
