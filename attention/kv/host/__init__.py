"""The host pool: latent rows in host memory, a shared file or CXL memory, its pages, and where that memory is."""
