"""What is worth changing in a step, with its evidence."""
