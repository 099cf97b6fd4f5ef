"""Weights: reading checkpoints straight into place, block FP8, random weights, and finding models."""
