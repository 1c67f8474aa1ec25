"""The launcher's side of a recording: it starts the training and manages the ranks' recordings."""
