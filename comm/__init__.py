"""Bytes between ranks: the dispatch/combine protocol of expert parallelism and its backends."""
