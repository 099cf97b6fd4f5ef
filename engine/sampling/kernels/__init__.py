"""Triton kernels of the sampler, and what each computes in plain PyTorch."""
