"""The arguments of a tool call in a conversation, as templates use them."""

from __future__ import annotations

import json
from typing import Any


class Arguments(dict[str, Any]):
    """A dict that is JSON text wherever a string is wanted.

    Some chat templates walk over the arguments or write them with ``tojson``; others, such as those of DeepSeek V3 and R1,
    put them between strings with "+". Text that the client sent is given back as it was.
    """

    def __init__(self, values: dict[str, Any], text: str | None = None) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False) if self._text is None else self._text

    def __add__(self, other: str) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented
