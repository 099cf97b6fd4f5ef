"""What went wrong on a rank in a phase that all ranks go through to its end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Trouble:
    """Problems of one phase; ranks tell each other of them when it is over."""

    problems: list[str] = field(default_factory=list)  # none: all is well
    blamed: int = -1  # rank that the first problem is about, if one is
    broken: bool = False  # a connection failed

    def fail(self, text: str, peer: int = -1) -> None:
        """Note a problem; the first one counts. ``peer``: the rank that it is about."""
        if not self.problems:
            self.blamed = peer
        self.problems.append(text)
