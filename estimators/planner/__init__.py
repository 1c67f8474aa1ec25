"""The search for the best mesh, batch and policy of a training that has not happened."""
