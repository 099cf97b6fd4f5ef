"""From logits to token ids.

Order of processing (vLLM's): banned tokens (``min_tokens``), ``logit_bias``, repetition, frequency and presence penalties, temperature,
top-k, top-p, min-p, then a draw. The draw is the inverse of the distribution function at one uniform number of
``noise.uniform(seed, position)``, over tokens in descending probability, ties by lowest id. Probabilities are summed as
integers, in which addition has no rounding: a row gives the same token whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .guided import Guided, allow
from .logprobs import TopLogprobs, gather_logprobs, sort_keys
from .noise import uniform
from .sample_rows import SampleRows
from .sampler_table import SamplerTable

#: probabilities relative to the likeliest token, in units of 2^-44: 2^17 tokens of weight 2^44 still fit int64
_WEIGHT_ONE = 2.0**44
#: likeliest tokens that the CPU orders first
_PREFIX = 256
#: elements that one block of the draw works on; bounds its memory to some 40 bytes an element
_BLOCK_ELEMENTS = 1 << 23


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """Sampled tokens, on the device of the logits."""

    tokens: torch.Tensor  # int64 [n]
    logprobs: TopLogprobs | None = None  # of every row, as wide as the widest request; None when no row asked


class RowsOnDevice(NamedTuple):
    """The index lists of ``SampleRows`` on the device of the logits, int64."""

    random: torch.Tensor
    penalised: torch.Tensor


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplerTable,
    token_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    host_slots: NDArray[np.int32] | None = None,
    max_length: int | None = None,
    rows: SampleRows | None = None,
    device_rows: RowsOnDevice | None = None,
    guided: Guided | None = None,
) -> SampleResult:
    """Sample one token per row. With the keyword arguments given, and debug mode off, the host does not wait for the device.

    Args:
        logits: fp32 [n, V]; not changed.
        slots: int64 or int32 [n], the row of ``table`` and ``token_table`` each row belongs to.
        positions: int64 [n], position of the token to be sampled; with the seed it makes the draw.
        table: parameters by slot.
        token_table: int32 [max_num_seqs, max_len], the tokens of every slot.
        lengths: int64 [n], tokens of ``token_table`` that count (prompt and output so far).
        host_slots: ``slots`` on the host; without it they are copied back, which waits for the device.
        max_length: a bound on ``lengths`` known to the host; the width of ``token_table`` by default.
        rows: ``SampleRows.of(table, host_slots)``, made here when it is not given.
        device_rows: its lists on the device, copied here when they are not given.
        guided: rows that may sample some tokens only.

    Raises:
        FloatingPointError: debug mode, and a logit is NaN or +inf; names the slots.
    """
    if logits.shape[0] == 0:
        return SampleResult(tokens=torch.empty(0, dtype=torch.int64, device=logits.device))
    host = slots.cpu().numpy() if host_slots is None else host_slots
    if table.debug:
        _check_finite(logits, host)
    rows = SampleRows.of(table, host) if rows is None else rows
    random, penalised = _on_device(rows, logits.device) if device_rows is None else device_rows
    raw, slots = logits, slots.long()
    if guided is not None:
        logits = allow(logits, guided)
    if rows.banned:
        logits = _ban(logits, slots, lengths, table)
    if rows.biased:
        logits = table.bias.add(logits, slots)
    if len(rows.penalised):
        logits = _penalise(logits, penalised, slots, lengths, table, token_table, max_length)
    tokens = greedy(logits)
    if len(rows.random):
        tokens = tokens.index_copy(0, random, _draw(logits, random, slots, positions, table))
    return SampleResult(tokens=tokens, logprobs=gather_logprobs(raw, tokens, rows.logprobs) if rows.logprobs >= 0 else None)


def _on_device(rows: SampleRows, device: torch.device) -> RowsOnDevice:
    return RowsOnDevice(torch.from_numpy(rows.random).to(device), torch.from_numpy(rows.penalised).to(device))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The highest logit of every row, the lowest id on ties: int64 [n]."""
    if logits.device.type == "cpu":  # numpy's search is vectorised, torch's is not
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return _device_greedy()(logits)


@cache
def _device_greedy() -> Callable[[torch.Tensor], torch.Tensor]:
    """The search on GPUs: a kernel where Triton is installed."""
    if find_spec("triton") is None:
        from .kernels.argmax_torch import greedy_tokens as plain

        return plain
    from .kernels.argmax import greedy_tokens

    return greedy_tokens


def _check_finite(logits: torch.Tensor, host: NDArray[np.int32]) -> None:
    """Raise FloatingPointError naming rows and slots with NaN or +inf (-inf is a masked token)."""
    bad = (~(logits < torch.inf)).any(dim=-1).nonzero().flatten().tolist()
    if bad:
        slots = [int(host[r]) for r in bad]
        where = f"rows {bad[:8]}, request slots {slots[:8]}"
        raise FloatingPointError(f"logits are NaN or +inf in {len(bad)} of {len(host)} sampled rows: {where}")


def _ban(logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, table: SamplerTable) -> torch.Tensor:
    """-inf for the banned ids of rows that are still shorter than their ban lasts."""
    ids, until = table.ban_ids[slots], table.ban_until[slots]
    active = (ids >= 0) & (lengths < until).unsqueeze(1)
    column = torch.where(active, ids, logits.shape[1])  # inactive entries go to a spare column
    padded = torch.nn.functional.pad(logits, (0, 1))
    return padded.scatter(1, column, -torch.inf)[:, :-1]


def _penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    table: SamplerTable,
    token_table: torch.Tensor,
    max_length: int | None,
) -> torch.Tensor:
    """Repetition penalty on tokens of prompt and output, frequency and presence penalties on tokens of the output; of ``rows``."""
    picked, length = slots[rows], lengths[rows].unsqueeze(1)
    width = min(max_length, token_table.shape[1]) if max_length is not None else token_table.shape[1]
    ids = token_table[picked, :width].long()
    column = torch.arange(width, device=ids.device).unsqueeze(0)
    generated = (column >= table.prompt_len[picked].unsqueeze(1)) & (column < length)
    seen = _count(ids, column < length, logits.shape[1]) > 0
    counts = _count(ids, generated, logits.shape[1])
    x = logits[rows]
    repetition = table.repetition_penalty[picked].to(x.dtype).unsqueeze(1)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - table.frequency_penalty[picked].to(x.dtype).unsqueeze(1) * counts
    x = x - table.presence_penalty[picked].to(x.dtype).unsqueeze(1) * (counts > 0)
    return logits.index_copy(0, rows, x)


def _count(ids: torch.Tensor, wanted: torch.Tensor, vocab: int) -> torch.Tensor:
    """How often each id occurs where ``wanted``: int32 [rows, vocab] from ids [rows, width]."""
    counts = torch.zeros((ids.shape[0], vocab + 1), dtype=torch.int32, device=ids.device)
    ids = torch.where(wanted, ids, vocab)  # what is not wanted is counted in a spare column
    return counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))[:, :-1]


def _draw(logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, table: SamplerTable) -> torch.Tensor:
    """Draw a token for each of ``rows``, int64 [len(rows)], in blocks of bounded memory."""
    block = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    drawn = []
    for part in torch.split(rows, block):
        picked = slots[part]
        noise = uniform(table.seed[picked], positions[part])
        drawn.append(draw(logits[part], noise, table.temperature[picked], table.top_k[picked], table.top_p[picked], table.min_p[picked]))
    return torch.cat(drawn)


def draw(
    logits: torch.Tensor, noise: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Temperature, truncation and the inverse distribution function at ``noise``.

    ``logits`` fp32 [n, V]; ``noise``, ``temperature``, ``top_p``, ``min_p`` float64 [n]; ``top_k`` int64 [n] (below 1: off).
    Returns int64 [n]. In descending order each truncation keeps a prefix, so all three come to one length. On the CPU the
    likeliest tokens alone are ordered first; rows that need more are done again with all tokens, to the same result.
    """
    vocab = logits.shape[1]
    scaled = logits / temperature.to(logits.dtype).unsqueeze(1)
    ratio = torch.exp((scaled - scaled.amax(dim=-1, keepdim=True)).double())  # probability relative to the likeliest token
    weights = (ratio * _WEIGHT_ONE).nan_to_num().long()
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    in_min_p = (ratio >= min_p.unsqueeze(1)).sum(dim=-1)
    if logits.is_cuda or vocab <= 2 * _PREFIX:  # a sort costs a GPU less than asking which rows need it
        return _pick(weights, _descending(scaled), noise, k, top_p, in_min_p)[0]
    likeliest = torch.topk(sort_keys(scaled), _PREFIX, dim=-1).indices
    tokens, settled = _pick(weights, likeliest, noise, k, top_p, in_min_p)
    rest = (~settled).nonzero().flatten()
    if rest.numel():
        again, _ = _pick(weights[rest], _descending(scaled[rest]), noise[rest], k[rest], top_p[rest], in_min_p[rest])
        tokens[rest] = again
    return tokens


def _descending(x: torch.Tensor) -> torch.Tensor:
    """Ids in descending order of ``x``, equal ones by lowest id: int64 [n, V]."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices


def _pick(
    weights: torch.Tensor, order: torch.Tensor, noise: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor, in_min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token at ``noise`` among the prefix that is kept, and whether the first M tokens were enough to know it.

    ``weights`` int64 [n, V] by id; ``order`` int64 [n, M], the M likeliest ids; ``k`` and ``in_min_p`` are the lengths of
    the prefixes that top-k and min-p keep.
    """
    vocab, m = weights.shape[1], order.shape[1]
    ordered = weights.gather(1, order)
    upto = torch.cumsum(ordered, dim=-1)
    total = weights.sum(dim=-1)

    def weight_of(length: torch.Tensor) -> torch.Tensor:
        """Weight of the likeliest ``length`` tokens; known for lengths up to M, and V."""
        return torch.where(length <= m, upto.gather(1, (length.clamp(max=m) - 1).unsqueeze(1)).squeeze(1), total)

    def known(length: torch.Tensor) -> torch.Tensor:
        return (length <= m) | (length == vocab)

    limit = (top_p * weight_of(k).double()).unsqueeze(1)
    in_p = ((upto - ordered).double() < limit).sum(dim=-1)
    settled = known(k) & ((in_p < m) | (top_p >= 1.0) | (m == vocab))
    in_p = torch.where(top_p >= 1.0, vocab, in_p)
    keep = torch.minimum(torch.minimum(k, in_p), in_min_p).clamp(min=1)
    kept = weight_of(keep)
    target = torch.minimum((noise * kept.double()).long(), kept - 1)
    index = torch.searchsorted(upto, target.unsqueeze(1), right=True)
    settled &= known(keep) & (index.squeeze(1) < m)
    return order.gather(1, index.clamp(max=m - 1)).squeeze(1), settled
