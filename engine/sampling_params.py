"""How one request is sampled and when it stops. Names and defaults follow vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .grammar.structured import StructuredOutputsParams

#: below this temperature a row is greedy (vLLM's limit)
GREEDY_TEMPERATURE = 1e-5
#: most alternatives that ``logprobs`` and ``prompt_logprobs`` may ask for
MAX_LOGPROBS = 64
#: most tokens with a ``logit_bias``
MAX_BIASES = 1024
#: the largest int64: counts and priorities of a request fit what travels between ranks
MAX_INT = 2**63 - 1
#: seeds are 63-bit, so that they fit the int64 column of a plan and -1 can mean "none"
MAX_SEED = MAX_INT


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Every value is checked; ValueError names field, value and allowed range."""

    n: int = 1  # completions of the prompt, each with its own noise
    temperature: float = 1.0  # divides the logits; below 1e-5 the highest logit is taken
    top_p: float = 1.0  # keep the smallest set of likeliest tokens that holds this probability; 1 keeps all
    top_k: int = -1  # keep this many likeliest tokens; 0 or -1 keeps all
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest one
    seed: int | None = None  # noise seed; the engine derives one from its own seed and the request when None
    stop: str | Sequence[str] | None = None  # strings that end the text; kept as a tuple
    stop_token_ids: Sequence[int] | None = None  # token ids that end the text; kept as a tuple
    max_tokens: int = 16  # most tokens generated
    min_tokens: int = 0  # no end token or stop token before this many were generated
    ignore_eos: bool = False  # go on after the model's end token
    presence_penalty: float = 0.0  # taken once from the logit of every token generated so far
    frequency_penalty: float = 0.0  # taken once per time that a token was generated so far
    repetition_penalty: float = 1.0  # divides (multiplies, if negative) logits of tokens in prompt and output
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None  # token id -> added to its logit; kept as pairs
    logprobs: int | None = None  # alternatives per generated token, beside the sampled one; None for no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    skip_special_tokens: bool = True  # leave special tokens out of the text
    include_stop_str_in_output: bool = False  # let the text end with the stop string (or stop token) that was met
    structured_outputs: StructuredOutputsParams | None = None  # the form of the output: a JSON schema, a regex, ...; any text when None

    def __post_init__(self) -> None:
        """Normalise ``stop`` and ``stop_token_ids`` to tuples and check every field."""
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        self._check_integers()
        self._check_floats()
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, found {getattr(self, name)!r}")
        if self.max_tokens > MAX_INT:
            raise ValueError(f"max_tokens must be at most {MAX_INT}, found {self.max_tokens}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), found {self.min_tokens}")

    def _check_integers(self) -> None:
        """Raise ValueError for an integer field out of its range."""
        _check_int("n", self.n, 1, None)
        _check_int("top_k", self.top_k, -1, 2**31 - 1, note=" (0 or -1 keeps every token)")
        _check_int("seed", self.seed, 0, MAX_SEED, optional=True)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)

    def _check_floats(self) -> None:
        """Raise ValueError for a number out of its range; kept as Python floats."""
        _check_float("temperature", self.temperature, lambda x: x >= 0, "0 or more")
        _check_float("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
        _check_float("min_p", self.min_p, lambda x: 0 <= x <= 1, "from 0 to 1")
        _check_float("presence_penalty", self.presence_penalty, lambda x: -2 <= x <= 2, "from -2 to 2")
        _check_float("frequency_penalty", self.frequency_penalty, lambda x: -2 <= x <= 2, "from -2 to 2")
        _check_float("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "above 0")
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        """True when the highest logit is taken instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True when earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as a tuple."""
        return tuple(self.stop_token_ids or ())

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs (token id, added to its logit), sorted by id."""
        pairs: Any = self.logit_bias or ()
        return tuple(pairs)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for a token id that a vocabulary of ``vocab_size`` ids does not have."""
        for name, ids in (("stop_token_ids", self.stop_ids), ("logit_bias", [token for token, _ in self.biases])):
            bad = [token for token in ids if token >= vocab_size]
            if bad:
                raise ValueError(f"{name} has {bad[0]}; the vocabulary has ids 0 to {vocab_size - 1}")

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain values for JSON; fields at their default are left out."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["stop"], values["stop_token_ids"] = list(self.stop_strings), list(self.stop_ids)
        values["logit_bias"] = [list(pair) for pair in self.biases]
        values["structured_outputs"] = None if self.structured_outputs is None else self.structured_outputs.to_wire()
        defaults = {f.name: f.default for f in fields(self)} | {"stop": [], "stop_token_ids": [], "logit_bias": []}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> SamplingParams:
        """The inverse of ``to_wire``. ValueError lists names that are no sampling parameters."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"unknown sampling parameters {unknown}; known are {[f.name for f in fields(cls)]}")
        return cls(**values)


def _strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; ValueError for anything but non-empty strings."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop must be a non-empty string, a list of them, or None, found {stop!r}")
    return tuple(stop)


def _token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    """Stop token ids as a tuple; ValueError for anything but integers from 0."""
    if ids is None:
        return ()
    bad = not isinstance(ids, Sequence) or isinstance(ids, str)
    if bad or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"stop_token_ids must be a list of token ids, each an integer of 0 or more, or None, found {ids!r}")
    return tuple(ids)


def _biases(bias: Any) -> tuple[tuple[int, float], ...]:
    """``logit_bias`` as pairs, sorted by id; ValueError for anything but finite numbers by token id."""
    if bias is None:
        return ()
    pairs = list(bias.items()) if isinstance(bias, Mapping) else list(bias) if isinstance(bias, (list, tuple)) else [bias]
    if len(pairs) > MAX_BIASES:
        raise ValueError(f"logit_bias has {len(pairs)} tokens; at most {MAX_BIASES} are allowed")
    found: dict[int, float] = {}
    for pair in pairs:
        token: Any
        value: Any
        token, value = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        token = int(token) if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10 else token  # JSON's keys
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not isinstance(token, int) or isinstance(token, bool) or token < 0 or not number or token in found:
            raise ValueError(f"logit_bias must map token ids, integers of 0 or more, each once, to numbers, found {pair!r}")
        if not -100 <= value <= 100:  # so that the message is made for a wrong one only: there may be many
            _check_float(f"logit_bias of token {token}", value, lambda x: -100 <= x <= 100, "from -100 to 100")
        found[token] = float(value)
    return tuple(sorted(found.items()))


def _check_int(name: str, value: object, low: int, high: int | None, *, optional: bool = False, note: str = "") -> None:
    """Raise ValueError unless ``value`` is an integer of low..high (or None, if optional)."""
    if optional and value is None:
        return
    allowed = (f"of {low} or more" if high is None else f"from {low} to {high}") + (", or None" if optional else "") + note
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be an integer {allowed}, found {value!r}")


def _check_float(name: str, value: object, ok: Any, allowed: str) -> None:
    """Raise ValueError unless ``value`` is a finite number for which ``ok`` holds."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not _is_finite(value) or not ok(value):
        raise ValueError(f"{name} must be a number {allowed}, found {value!r}")


def _is_finite(value: Any) -> bool:
    """Whether a number is one that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False
