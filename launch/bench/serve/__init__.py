"""``bench serve`` and its kin: load for any OpenAI server, what came of it, sweeps and comparisons."""
