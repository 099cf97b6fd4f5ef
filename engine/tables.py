"""Device tables of one rank, one row per request slot: tokens, pages, sampling parameters."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .plan import INT_COLUMNS, StepPlan
from .sampling.sampler_table import SamplerTable

_COLUMN = {name: i for i, name in enumerate(INT_COLUMNS)}


class DeviceTables:
    """Token table, page table and sampling parameters, kept equal on all ranks of a replica by applying its plans.

    Tokens are -1 until written, so that reading a token nobody wrote is caught; pages are ``dummy_page`` until assigned.
    """

    def __init__(self, *, max_num_seqs: int, max_len: int, page_size: int, dummy_page: int, device: torch.device) -> None:
        pages = -(-max_len // page_size)
        self.device = device
        self.dummy_page = dummy_page
        self.tokens = torch.full((max_num_seqs, max_len + 1), -1, dtype=torch.int32, device=device)
        self.pages = torch.full((max_num_seqs, pages), dummy_page, dtype=torch.int32, device=device)
        self.sampling = SamplerTable(max_num_seqs, device)
        self.prompt_len: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)  # on the host: it decides shapes

    def apply(self, plan: StepPlan) -> None:
        """Take in the requests that enter slots and the pages assigned by ``plan``."""
        if len(plan.new_ints):
            self._enter(plan)
        if len(plan.pages):
            slot, index, page = (torch.from_numpy(plan.pages[:, i].astype(np.int64)).to(self.device) for i in range(3))
            self.pages[slot, index] = page.to(torch.int32)

    def _enter(self, plan: StepPlan) -> None:
        slots = plan.new_ints[:, _COLUMN["slot"]]
        lengths = plan.new_ints[:, _COLUMN["length"]]
        self.prompt_len[slots] = plan.new_ints[:, _COLUMN["prompt_len"]]
        rows = torch.from_numpy(slots.copy()).to(self.device)
        self.tokens[rows] = -1
        self.pages[rows] = self.dummy_page
        where = np.repeat(slots, lengths)
        column = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = torch.from_numpy(plan.new_tokens.copy()).to(self.device)
        self.tokens[torch.from_numpy(where).to(self.device), torch.from_numpy(column).to(self.device)] = values
        self.sampling.set(plan.new_ints, plan.new_floats, plan.new_bans)
