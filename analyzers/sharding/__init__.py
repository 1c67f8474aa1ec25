"""The layout of a job: its mesh, and the parts of every parameter that each rank holds."""
