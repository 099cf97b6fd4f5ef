"""Why a part failed, in one line, from what its ranks printed."""

from __future__ import annotations

import re
import signal

_LONGEST = 300  # characters
_TAIL = 1 << 20  # bytes of a part's print that are looked through
_OURS, _PYTHONS = r"rorqual: \S.*", r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Refusal|Timeout|Failed|Exit)\b:? ?.*"
_ERROR = re.compile(rf"^(?:\[rank\d+\]:\s*)?({_OURS}|{_PYTHONS})$")
_FAILED = re.compile(r"^\s*\S.*\bFAILED: (.*)$")  # a line of a conformance check
_KILLED = re.compile(r"exitcode\s*: -(\d+)")
_REPORT = "ChildFailedError"  # torchrun's own, which says nothing


def reason_of(printed: bytes) -> str:
    """The first error that was printed, and the signal that ended a rank where one did; '' when nothing says why."""
    lines = printed[-_TAIL:].decode("utf-8", "replace").splitlines()
    found = []
    for signals in (m.group(1) for line in lines if (m := _KILLED.search(line))):
        if int(signals) != signal.SIGTERM:  # with that torchrun ends the others
            found.append(_signal(int(signals)))
            break
    for line in lines:
        match = _FAILED.match(line) or _ERROR.match(line)
        if match and _REPORT not in line:
            found.append(" ".join(match.group(1).split()))
            break
    return "; ".join(found)[:_LONGEST]


def _signal(number: int) -> str:
    """Such as ``a rank was ended by SIGKILL``."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"a rank was ended by {name}" + (" (did the host run out of memory?)" if number == signal.SIGKILL else "")
