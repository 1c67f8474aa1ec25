"""What NCCL's own files say: how fast its collectives were, and why a group is slow."""
