"""A progress bar on stderr, for work that takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, label: str, *, quiet: bool = False) -> Iterator[Callable[[int], object]]:
    """A function that moves the bar on by a number of steps; there is no bar where nobody looks (``quiet``, or stderr is no screen)."""
    from tqdm import tqdm

    bar = tqdm(total=total, desc=label, file=sys.stderr, disable=quiet or not sys.stderr.isatty(), leave=False)
    try:
        yield bar.update
    finally:
        bar.close()
