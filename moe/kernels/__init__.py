"""Triton kernels of routing and experts. Every one has a plain-PyTorch twin of the same signature."""
