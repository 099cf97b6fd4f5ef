"""Benchmarks and the files that hold their results."""
