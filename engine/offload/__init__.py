"""Which pages are on the device and which on the host: decided by the leader from lengths and counts, applied by every rank."""
