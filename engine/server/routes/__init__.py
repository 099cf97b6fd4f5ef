"""Routes beside the generating ones."""
