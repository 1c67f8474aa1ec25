"""What ``torch.compile`` makes of a model's blocks: what they save, and their kernels' memory."""
