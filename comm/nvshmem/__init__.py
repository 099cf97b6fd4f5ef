"""NVSHMEM below expert parallelism: the installed libraries, the runtime of this process, and device functions for Triton kernels."""
