"""The inputs of an estimate: model, mesh, policy, hardware."""
