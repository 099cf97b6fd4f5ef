"""Kernels that know no model: block-FP8 products, activation quantisation, and early starts of any kernel."""
