"""When everything of a predicted step happens: captured commands, their costs, and a simulation of the
streams."""
