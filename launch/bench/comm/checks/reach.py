"""What a backend can be asked for. Most carry everything; those over a package carry what that does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .....comm.routed import LAYOUTS
from .inputs import KINDS


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What checks may ask of a backend."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of tokens and results; the first is the usual one
    sums: tuple[bool, ...] = (False, True)  # values of ``EPSpec.deterministic``
    bits: bool = True  # sums have the order of the plain ones
    raw: bool = True  # the payload "bytes"
    width: int = 1  # ``hidden`` is a multiple of it
    layouts: tuple[str, ...] = LAYOUTS
    kinds: tuple[str, ...] = KINDS  # of routings
    without: frozenset[str] = frozenset()  # checks of what it does not tell


#: deep_ep sends a slot that a token names again once, with the weights added; it tells neither its bytes nor its memory
_PACKAGE = Reach(
    dtypes=("bfloat16",), sums=(False,), raw=False, width=256, kinds=tuple(kind for kind in KINDS if kind != "repeated"),
    without=frozenset({"traffic", "memory"}),
)  # fmt: skip
_REACH = {
    "deep_ep": _PACKAGE,
    "deep_ep_ll": replace(  # rows of a slot come in any order, and nothing says whose they are
        _PACKAGE, bits=False, width=2048, layouts=("masked", "contiguous"), without=_PACKAGE.without | {"arrivals", "payloads", "shapes"}
    ),
}


def reach_of(backend: str) -> Reach:
    """The reach of a backend, by its name."""
    return _REACH.get(backend, Reach())
