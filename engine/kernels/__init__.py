"""Triton kernels of the engine's own: the two ends of a decode step."""
