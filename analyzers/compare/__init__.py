"""Changes from one side to another: time, communication, memory."""
