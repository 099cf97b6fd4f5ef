"""Kernels that know no model: block-FP8 products and activation quantisation."""
