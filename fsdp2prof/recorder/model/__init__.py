"""What a recording says of the model: roots, groups, who owns which parameter."""
