"""``bench server``: what serving itself costs, in front of a model that costs nothing."""
