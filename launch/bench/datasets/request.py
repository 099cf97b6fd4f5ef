"""One request of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

#: text -> token ids
Encode = Callable[[str], list[int]]
#: token ids -> text
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a user of a conversation says after an answer."""

    token_ids: list[int]  # new prompt tokens
    output_len: int  # tokens of the answer
    text: str | None = None  # the same as text, where the dataset is text


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how many tokens it must generate; with ``then``, the first turn of a conversation."""

    token_ids: list[int]  # the prompt
    output_len: int  # tokens to generate, end tokens ignored
    text: str | None = None  # the prompt as text, where the dataset is text
    at: float | None = None  # seconds after the start at which it arrives, where the dataset says so
    then: tuple[Turn, ...] = ()  # later turns: each goes on from the answer before

    def turned(self) -> Request:
        """A request of the same size with another prompt, so that it finds nothing in a prefix cache and leaves nothing there."""
        text = None if self.text is None else self.text[::-1]
        return replace(self, token_ids=self.token_ids[::-1], text=text, at=None, then=())


def flat(requests: Sequence[Request]) -> list[Request]:
    """Conversations as single requests, for engines that answer all at once: a stand-in takes the place of each answer.

    The stand-in is the prompt's last tokens over and over, so that shared prefixes stay shared.
    """
    found: list[Request] = []
    for request in requests:
        history, length = list(request.token_ids), request.output_len
        found.append(replace(request, then=()))
        for turn in request.then:
            history = history + [history[-1 - i % len(history)] for i in range(length)] + turn.token_ids
            length = turn.output_len
            found.append(Request(token_ids=list(history), output_len=length, at=request.at))
    return found


def check_least(name: str, value: int, least: int) -> None:
    """Refuse a setting below ``least``; ValueError names it by its flag."""
    if value < least:
        raise ValueError(f"--{name} must be at least {least}, found {value}")
