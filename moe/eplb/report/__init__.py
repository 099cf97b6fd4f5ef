"""One HTML page about a load and a plan for it."""
