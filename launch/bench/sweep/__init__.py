"""``bench sweep``: layouts and loads one after the other, and what they give for what latency."""
