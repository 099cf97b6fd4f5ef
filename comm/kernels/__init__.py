"""Kernels of dispatch and combine over mapped memory, and their plain twins (``*_torch``)."""
