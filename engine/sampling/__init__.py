"""From logits to tokens: noise, truncation, penalties, log-probabilities."""
