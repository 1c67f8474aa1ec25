"""A training job that has not happened, executed on fake tensors in a fake process group."""
