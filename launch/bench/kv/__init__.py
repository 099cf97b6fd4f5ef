"""Benchmarks of KV rows in host memory: the link, replacement policies, an attention rig, and serving from cached prefixes."""
