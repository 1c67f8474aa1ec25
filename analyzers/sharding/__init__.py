"""How a job is laid out: its mesh, and which rank holds what of every parameter."""
