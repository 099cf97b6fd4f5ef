"""Multi-head latent attention, the sparse-attention indexer, and the paged caches under them."""
