"""Measured and made loads of experts: recording, windows, views, and a generator that has the skew of real models."""
