"""Row layouts, pools and page accounting of the latent and indexer-key caches."""
