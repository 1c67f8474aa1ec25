"""What is said of a prediction: whether it fits, its range, its notes, what to change."""
