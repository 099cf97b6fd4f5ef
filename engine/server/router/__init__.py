"""A router over several OpenAI servers: one address for all of them, each request goes where it costs least. Needs no torch."""
