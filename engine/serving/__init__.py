"""Serving: the endless loop of the engine's ranks, and the messages between rank 0 and the HTTP processes. ``wire`` needs no torch."""
