"""Training linear layers in float8, by the recipes of torchao."""
