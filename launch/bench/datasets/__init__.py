"""Requests of the benchmarks: made ones and those of files."""
