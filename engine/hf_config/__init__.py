"""Hugging Face config.json reduced to the engine's shapes and switches."""
