"""Triton kernels that call NVSHMEM. Imported only once a runtime is there."""
