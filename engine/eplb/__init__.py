"""Expert balancing in the engine: where experts begin, when they move, and what is said of it."""
