"""Expert load balancing: measured load, plans of where experts live, and moving to them while tokens are generated.

``tools`` has the public functions under one roof.
"""
