"""One dispatch and combine of known tokens at setup: a path that is wrong is found before a model's tokens go through it."""

from __future__ import annotations

import torch

from .dispatcher import Dispatcher, EPSpec
from .fp8 import dequantise
from .rows import DTYPES, token_dtype

_TOKENS = 8  # of a rank
_ERROR = 1 / 8  # of the largest value: twice what FP8 rounds


def _known(spec: EPSpec, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, slot_ids and weights of ``rank``; weights of a token add up to one."""
    n = min(_TOKENS, spec.max_tokens)
    token = torch.arange(n).unsqueeze(1)
    x = ((7 * token + 3 * rank + torch.arange(spec.hidden)) % 13 - 6).to(token_dtype(spec))
    ids = (token * spec.slots_per_rank + rank + torch.arange(spec.top_k)) % spec.n_slots
    return x, ids.int(), torch.full((n, spec.top_k), 1 / spec.top_k)


def self_test(dispatcher: Dispatcher, rank: int, device: torch.device) -> str | None:
    """Collective: send known tokens through experts that change nothing. What is wrong on this rank, or None.

    Bytes are not values that can be added: they are only looked at where they arrive.
    """
    spec = dispatcher.spec
    x, ids, weights = _known(spec, rank)
    routed = dispatcher.dispatch(x.to(device), ids.to(device), weights.to(device), layout="contiguous")
    y = routed.x
    if routed.scales is not None:
        y = dequantise(routed.x, routed.scales, DTYPES[spec.dtype])
    out = dispatcher.combine(y.to(DTYPES[spec.dtype]), routed).float().cpu()
    dispatcher.health(wait=True)
    arrived, sources = (routed.x if spec.payload == "bytes" else y).cpu(), routed.sources
    if sources is not None:
        for place, source in enumerate(sources.tolist()):
            if source >= 0:
                want = _known(spec, source // spec.max_tokens)[0][source % spec.max_tokens].float()
                if (arrived[place].float() - want).abs().max() > _ERROR * 6:
                    return f"token {source % spec.max_tokens} of rank {source // spec.max_tokens} arrived changed"
    if spec.payload != "bytes" and len(x) and (out - x.float()).abs().max() > _ERROR * 6:
        worst = int((out - x.float()).abs().amax(dim=1).argmax())
        return f"token {worst} came back changed: {out[worst, :4].tolist()} for {x[worst, :4].tolist()} in its first values"
    return None
