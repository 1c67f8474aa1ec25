"""Results from NCCL's own files: the speed of its collectives, and the reason a group is slow."""
