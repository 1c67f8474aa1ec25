"""The launcher's side of a recording: it starts the training and looks after what the ranks leave."""
