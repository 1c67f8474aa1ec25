"""Small files that jobs leave: Flight Recorder dumps, stacks, NCCL's logs and Inspector files."""
