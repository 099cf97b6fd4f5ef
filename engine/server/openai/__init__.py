"""OpenAI's API: requests, answers, streams."""
