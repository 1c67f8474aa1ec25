"""The effect of ``torch.compile`` on a model's blocks: which tensors they save, and their kernels' memory."""
