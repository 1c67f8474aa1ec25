"""Description of the model in a recording: roots, groups, owners of parameters."""
