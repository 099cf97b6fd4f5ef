"""Plans from nothing: how many replicas, on which ranks, and how far from what is possible."""
