"""A rank's side of a recording: steps seen, captures made, endings survived."""
