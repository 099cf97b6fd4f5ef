"""Expert-parallel exchange: what it must do, and how fast it is."""
