"""The CUDA caching allocator, modelled, and what CUDA kernels allocate besides their results."""
