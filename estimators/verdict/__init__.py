"""The text about a prediction: whether it fits, its range, its notes, and changes to make."""
