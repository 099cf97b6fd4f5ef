"""Device tables of one rank, one row per request slot: tokens, pages, sampling parameters."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .plan import FLOAT_COLUMNS, INT_COLUMNS, StepPlan
from .sampling.sampler_table import SamplerTable
from .staging import Staging
from .streams import Streams

_COLUMN = {name: i for i, name in enumerate(INT_COLUMNS)}


def request_table_bytes(*, max_num_seqs: int, max_len: int, page_size: int) -> int:
    """Device bytes of ``DeviceTables``: tokens, pages and sampling parameters of every slot."""
    pages = -(-max_len // page_size)
    sampling = 8 * (len(FLOAT_COLUMNS) + len(INT_COLUMNS) + 2)
    return 4 * (max_num_seqs + 1) * (max_len + 1 + pages) + max_num_seqs * sampling


class DeviceTables:
    """Token table, page table and sampling parameters, kept equal on all ranks of a replica by applying its plans.

    Tokens are -1 until written, so that reading a token nobody wrote is caught; pages are ``dummy_page`` until assigned. The
    last row of tokens and pages belongs to no request: padding rows of a captured step read and write it.
    """

    def __init__(
        self, *, max_num_seqs: int, max_len: int, page_size: int, dummy_page: int, device: torch.device, staging: Staging | None = None
    ) -> None:
        pages = -(-max_len // page_size)
        self.device = device
        self.dummy_page = dummy_page
        self.spare_slot = max_num_seqs
        self.staging = staging or Staging(Streams(device))
        self.tokens = torch.full((max_num_seqs + 1, max_len + 1), -1, dtype=torch.int32, device=device)
        self.tokens[self.spare_slot] = 0
        self.pages = torch.full((max_num_seqs + 1, pages), dummy_page, dtype=torch.int32, device=device)
        self.sampling = SamplerTable(max_num_seqs, device)
        self.prompt_len: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)  # on the host: it decides shapes

    def apply(self, plan: StepPlan, *, pages: bool = True) -> None:
        """Take in the requests that enter slots and, if ``pages``, the pages assigned by ``plan``."""
        if len(plan.new_ints):
            self._enter(plan)
        if pages and len(plan.pages):
            found = self.staging.upload({"where": plan.pages[:, :2].T.astype(np.int64, order="C"), "page": plan.pages[:, 2].copy()})
            slot, index = found["where"]
            self.pages[slot, index] = found["page"]

    def _enter(self, plan: StepPlan) -> None:
        slots = plan.new_ints[:, _COLUMN["slot"]]
        lengths = plan.new_ints[:, _COLUMN["length"]]
        self.prompt_len[slots] = plan.new_ints[:, _COLUMN["prompt_len"]]
        where = np.repeat(slots, lengths)
        column = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        found = self.staging.upload({"rows": slots.copy(), "where": where, "column": column, "values": plan.new_tokens})
        # Not by `self.tokens[rows] = -1`: a Python number would be copied to the device first, for which the host waits.
        self.tokens.index_fill_(0, found["rows"], -1)
        self.pages.index_fill_(0, found["rows"], self.dummy_page)
        self.tokens[found["where"], found["column"]] = found["values"]
        self.sampling.set(plan.new_ints, plan.new_floats, plan.new_bans, plan.new_biases, upload=self.staging.upload)
