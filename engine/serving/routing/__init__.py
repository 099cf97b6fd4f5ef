"""Which DP rank runs a request: by turns, by load, or by what is in each replica's prefix cache. Needs no torch."""
