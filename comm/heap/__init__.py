"""Symmetric memory: the same bytes on every rank of a group, each rank's mapped into the others."""
