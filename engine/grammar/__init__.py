"""Structured output: grammars that tell which tokens may come next."""
