"""Token counts of an answer."""

from __future__ import annotations

from typing import Any


class Usage:
    """Counts of one HTTP request while its pieces come."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt = prompt_tokens  # over all prompts
        self.completion = 0
        self.cached = 0
        self.reasoning = 0  # of the completion's tokens

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's object."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return found
