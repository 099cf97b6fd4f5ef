"""Sampling parameters by request slot, on the device, with the few flags that the host decides by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...parallel.debug import debugging
from ..plan import FLOAT_COLUMNS, INT_COLUMNS
from ..sampling_params import GREEDY_TEMPERATURE, MAX_INT, SamplingParams
from .bias_table import NO_BIASES, BiasTable, Upload, by_slot

_NO_BANS = np.zeros((0, 3), dtype=np.int64)


class SamplerTable:
    """One row per slot of the engine. A row is overwritten when a request enters its slot.

    Device tensors, indexed by slot: ``temperature, top_p, min_p, presence_penalty, frequency_penalty,
    repetition_penalty`` float64 [S]; ``prompt_len, top_k, seed`` int64 [S];
    ``ban_ids`` int64 [S, B] (-1 padded) and ``ban_until`` int64 [S]: ids that may not be sampled while the request
    has fewer than ``ban_until`` tokens. The ``host_*`` arrays tell without a copy from the device what a batch needs.
    """

    def __init__(self, max_num_seqs: int, device: torch.device | str, *, debug: bool | None = None) -> None:
        """``debug`` checks logits for NaN; by default it is on when RORQUAL_DEBUG is set."""
        self.debug = debugging() if debug is None else debug
        self.device = torch.device(device)
        n = max_num_seqs
        self._floats = torch.zeros((n, len(FLOAT_COLUMNS)), dtype=torch.float64, device=self.device)
        self._ints = torch.zeros((n, len(INT_COLUMNS)), dtype=torch.int64, device=self.device)
        self.ban_ids = torch.full((n, 1), -1, dtype=torch.int64, device=self.device)
        self.ban_until = torch.zeros(n, dtype=torch.int64, device=self.device)
        self.bias = BiasTable(n, self.device)
        self.host_greedy = np.ones(n, dtype=np.bool_)
        self.host_penalised = np.zeros(n, dtype=np.bool_)
        self.host_banned = np.zeros(n, dtype=np.bool_)
        self.host_logprobs = np.full(n, -1, dtype=np.int64)
        self.host_prompt_logprobs = np.full(n, -1, dtype=np.int64)
        self.host_plain = np.ones(n, dtype=np.bool_)  # the highest logit is all that is wanted
        floats = dict(zip(FLOAT_COLUMNS, self._floats.unbind(1), strict=True))  # views: they follow ``set``
        ints = dict(zip(INT_COLUMNS, self._ints.unbind(1), strict=True))
        self.temperature, self.top_p, self.min_p = floats["temperature"], floats["top_p"], floats["min_p"]
        self.presence_penalty, self.frequency_penalty = floats["presence_penalty"], floats["frequency_penalty"]
        self.repetition_penalty = floats["repetition_penalty"]
        self.prompt_len, self.top_k, self.seed = ints["prompt_len"], ints["top_k"], ints["seed"]

    def set(
        self,
        new_ints: NDArray[np.int64],
        new_floats: NDArray[np.float64],
        new_bans: NDArray[np.int64] = _NO_BANS,
        new_biases: NDArray[np.float64] = NO_BIASES,
        *,
        upload: Upload | None = None,
    ) -> None:
        """Fill the rows of requests that enter slots.

        ``new_ints`` [N, INT_COLUMNS], ``new_floats`` [N, FLOAT_COLUMNS] as in ``StepPlan``; ``new_bans`` int64 [B, 3]:
        slot, length until which the ban lasts, token id (see ``ban_rows``); ``new_biases`` float64 [B, 3] as in ``StepPlan``.
        ``upload`` brings arrays to the device, by a
        plain copy if it is not given.
        """
        if len(new_ints) == 0:
            return
        slots = new_ints[:, INT_COLUMNS.index("slot")]
        arrays = {"slots": slots.astype(np.int64), "ints": new_ints.astype(np.int64), "floats": new_floats.astype(np.float64)}
        bans = self._bans(slots, new_bans)
        self.bias.set(slots, new_biases, upload or self._copy)
        if bans is not None:
            arrays["ban_ids"], arrays["ban_until"] = bans
        found = (upload or self._copy)(arrays)
        where = found["slots"]
        self._ints[where] = found["ints"]
        self._floats[where] = found["floats"]
        if bans is not None:
            self.ban_ids[where] = found["ban_ids"]
            self.ban_until[where] = found["ban_until"]
        column = {name: new_floats[:, i] for i, name in enumerate(FLOAT_COLUMNS)}
        self.host_greedy[slots] = column["temperature"] < GREEDY_TEMPERATURE
        self.host_penalised[slots] = (
            (column["presence_penalty"] != 0) | (column["frequency_penalty"] != 0) | (column["repetition_penalty"] != 1)
        )
        self.host_logprobs[slots] = new_ints[:, INT_COLUMNS.index("logprobs")]
        self.host_prompt_logprobs[slots] = new_ints[:, INT_COLUMNS.index("prompt_logprobs")]
        extra = self.host_penalised[slots] | self.host_banned[slots] | self.bias.host[slots] | (self.host_logprobs[slots] >= 0)
        self.host_plain[slots] = self.host_greedy[slots] & ~extra & (self.host_prompt_logprobs[slots] < 0)

    def _copy(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}

    def _bans(self, slots: NDArray[np.int64], new_bans: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Banned ids [N, width] and their lengths [N] of ``slots``; None when there were none and come none.

        The table is widened when a request bans more ids than any before.
        """
        assert np.isin(new_bans[:, 0], slots).all(), "a ban names a slot that no request enters"
        stale = bool(self.host_banned[slots].any())
        self.host_banned[slots] = False
        if len(new_bans) == 0 and not stale:
            return None
        grouped = by_slot(new_bans)
        extra = max((len(rows) for rows in grouped.values()), default=0) - self.ban_ids.shape[1]
        if extra > 0:
            self.ban_ids = torch.nn.functional.pad(self.ban_ids, (0, extra), value=-1)
        ids = np.full((len(slots), self.ban_ids.shape[1]), -1, dtype=np.int64)
        until = np.zeros(len(slots), dtype=np.int64)
        for place, slot in enumerate(slots.tolist()):
            if slot in grouped:
                rows = grouped[slot]
                ids[place, : len(rows)], until[place] = rows[:, 2], rows[0, 1]
                self.host_banned[slot] = True
        return ids, until


def ban_rows(slot: int, prompt_len: int, params: SamplingParams, eos_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Rows of ``new_bans`` for a request: with ``min_tokens``, its end and stop tokens until the length is reached.

    As in vLLM the model's end tokens stay banned with ``ignore_eos`` too, where they would not end the text.
    """
    if params.min_tokens == 0:
        return []
    ids = sorted({*eos_ids, *params.stop_ids})
    return [(slot, min(prompt_len + params.min_tokens, MAX_INT), token) for token in ids]


def param_floats(params: SamplingParams) -> tuple[float, ...]:
    """The row of ``StepPlan.new_floats`` for a request."""
    return tuple(float(getattr(params, name)) for name in FLOAT_COLUMNS)


def param_ints(params: SamplingParams, *, slot: int, length: int, prompt_len: int, seed: int) -> tuple[int, ...]:
    """The row of ``StepPlan.new_ints`` for a request; ``seed`` comes from ``noise.request_seed``."""
    values = {"slot": slot, "length": length, "prompt_len": prompt_len, "top_k": params.top_k, "seed": seed}
    values["logprobs"] = -1 if params.logprobs is None else params.logprobs
    values["prompt_logprobs"] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
    return tuple(values[name] for name in INT_COLUMNS)
