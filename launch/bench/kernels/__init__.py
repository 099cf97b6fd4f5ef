"""``bench kernels``: every kernel at the shapes that matter, against its floor and its peers."""
