"""Arguments of a ``generate`` call, spread to one for each prompt. Rank 0 does it, so that all ranks get the same refusal."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Sized
from numbers import Integral
from typing import Any

from .sampling_params import MAX_INT, SamplingParams

#: a prompt as the API takes it
Prompt = str | Sequence[int] | dict[str, Any]
#: sampling parameters as the API takes them: for all prompts, or one for each
Params = SamplingParams | Sequence[SamplingParams] | None


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; a bare list of integers is one prompt. What cannot be a prompt is left for rank 0 to refuse."""
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, Iterable):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(p, Integral) for p in listed) else listed


def spread_params(params: Params, count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt.

    Raises:
        ValueError: a list of another length, or something else than SamplingParams.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    wrong = [params] if not isinstance(params, Sequence) else [p for p in params if not isinstance(p, SamplingParams)]
    if wrong:
        raise ValueError(f"sampling_params must be SamplingParams or a list of them, found {type(wrong[0]).__name__}")
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts; give one for all, or one per prompt")
    return list(params)


def spread_priority(priority: Sequence[int] | None, count: int) -> list[int]:
    """One priority per prompt, 0 where none was given.

    Raises:
        ValueError: no list, a list of another length, or an entry that is no integer of 64 bits.
    """
    if priority is None:
        return [0] * count
    if isinstance(priority, str) or not isinstance(priority, Sized):
        raise ValueError(f"priority must be a list of integers, one per prompt, found {priority!r}")
    if len(priority) != count:
        raise ValueError(f"priority has {len(priority)} entries for {count} prompts; give one per prompt")
    found = integers(priority, "priority")
    wide = [value for value in found if not -MAX_INT <= value <= MAX_INT]
    if wide:
        raise ValueError(f"priority must be integers from {-MAX_INT} to {MAX_INT}, found {wide[0]}")
    return found


def integers(values: Iterable[Any], name: str) -> list[int]:
    """``values`` as Python integers; those of numpy and torch count.

    Raises:
        ValueError: naming the first that is no integer.
    """
    found = []
    for value in values:
        try:
            found.append(operator.index(value))
        except TypeError:
            raise ValueError(f"{name} must be integers, found {value!r}") from None
    return found
