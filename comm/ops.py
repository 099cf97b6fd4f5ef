"""The four operations of the peer-memory backends, as kernels or as their twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..parallel.backends import needing

Op = Callable[..., Any]
_NAMES = ("send_tokens", "receive_tokens", "send_home", "sum_home")


@dataclass(frozen=True, kw_only=True)
class PeerOps:
    """One implementation. Shapes and dtypes are in the docstrings of ``comm.kernels.*_torch``."""

    name: str  # "torch" or "triton"
    send_tokens: Op
    receive_tokens: Op
    send_home: Op
    sum_home: Op

    @classmethod
    def load(cls, name: str) -> PeerOps:
        """The kernels ("triton") or their twins ("torch").

        Raises:
            ValueError: another name, or Triton is not installed.
        """
        if name not in ("torch", "triton"):
            raise ValueError(f"operations over peer memory must be torch or triton, found {name!r}")
        suffix = "_torch" if name == "torch" else ""
        with needing(f"operations over peer memory by {name!r}", ("triton",), "the torch backend"):
            found = {op: getattr(import_module(f".kernels.{op}{suffix}", __package__), op) for op in _NAMES}
        return cls(name=name, **found)
