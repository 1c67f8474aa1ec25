"""Memory, communication and step time of a run that has not happened."""
