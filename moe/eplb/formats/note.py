"""What a load trace knows besides its counts, as plain values that go into files of other engines under a key of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..topology import Ints
from ..trace import PHASES, LoadTrace

#: key of the note; readers of other engines look only at theirs
KEY = "rorqual"


def note_of(trace: LoadTrace) -> dict[str, Any]:
    """JSON values."""
    return {
        "layer_ids": list(trace.layer_ids),
        "n_steps": trace.n_steps,
        "top_k": trace.top_k,
        "tokens": None if trace.tokens is None else trace.tokens.tolist(),
        "phase": None if trace.phase is None else [PHASES[phase] for phase in trace.phase],
        "domain": None if trace.domain is None else list(trace.domain),
        "n_ranks": trace.n_ranks,
        "meta": dict(trace.meta),
    }


def with_note(counts: Ints, note: Mapping[str, Any]) -> LoadTrace:
    """The trace that ``note_of`` described, with these counts [steps, layers, experts].

    Raises:
        ValueError: the note does not fit, or is not one.
    """
    try:
        phase, domain, tokens = note.get("phase"), note.get("domain"), note.get("tokens")
        if note.get("n_steps") not in (None, len(counts)):
            raise ValueError(f"load trace: {note['n_steps']} steps were written and {len(counts)} are there; was the file cut?")
        return LoadTrace(
            counts=counts,
            layer_ids=tuple(int(layer) for layer in note["layer_ids"]),
            top_k=None if note.get("top_k") is None else int(note["top_k"]),
            tokens=None if tokens is None else np.array([int(n) for n in tokens], dtype=np.int64),
            phase=None if phase is None else np.array([PHASES.index(name) for name in phase], dtype=np.int64),
            domain=None if domain is None else tuple(str(name) for name in domain),
            n_ranks=None if note.get("n_ranks") is None else int(note["n_ranks"]),
            meta={str(key): str(value) for key, value in dict(note.get("meta") or {}).items()},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"load trace: its note {KEY!r} is damaged ({error!r})") from None
