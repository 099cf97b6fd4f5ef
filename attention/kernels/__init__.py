"""Triton kernels of attention. Every one has a plain-PyTorch twin of the same signature."""
