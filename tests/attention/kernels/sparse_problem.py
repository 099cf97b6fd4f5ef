"""Problems for the kernels of sparse attention: rows in use among poisoned ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rorqual.attention.kv.layout import encode_latent


@dataclass(kw_only=True)
class Problem:
    q_latent: torch.Tensor
    q_rope: torch.Tensor
    pool: torch.Tensor
    rows: torch.Tensor
    sink: torch.Tensor | None
    n_keys: torch.Tensor | None
    scale: float = 0.1

    @property
    def tensors(self):
        return self.q_latent, self.q_rope, self.pool, self.rows

    @property
    def options(self):
        return {"scale": self.scale, "sink": self.sink, "n_keys": self.n_keys}


def make(
    tokens,
    heads,
    k,
    *,
    latent=512,
    rope=64,
    q=torch.float32,
    pool="fp8",
    n_rows=400,
    spread=0.0,
    sink=True,
    counts=True,
    device="cpu",
    seed=0,
):
    """Even rows are used; odd ones hold NaN and are named only where no key is: past ``n_keys``.

    ``counts``: False gives no ``n_keys``, "all" has all columns count, True a random number of them and none of the first token's.
    ``spread``: standard deviation of ln(scale).
    """
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(n_rows, latent + rope, generator=made)
    if spread:
        groups = -(-latent // 128)
        values[:, :latent] *= (torch.randn(n_rows, groups, generator=made) * spread).exp().repeat_interleave(128, 1)[:, :latent]
    stored = encode_latent(values, latent) if pool == "fp8" else values.to(pool)
    stored[1::2] = 255 if pool == "fp8" else float("nan")
    rows = torch.randint(0, n_rows // 2, (tokens, k), generator=made).int() * 2
    chance = torch.rand(tokens, k, generator=made)
    rows[chance < 0.1] = -1
    rows[(chance > 0.1) & (chance < 0.14)] = -5
    rows[(chance > 0.14) & (chance < 0.2)] = n_rows
    rows[-1] = -1  # a query without keys
    n_keys = None
    if counts:
        n_keys = torch.full((tokens,), k, dtype=torch.int32)
        if counts != "all":
            n_keys = torch.randint(1, k + 1, (tokens,), generator=made).int()
            n_keys[0] = 0
        rows[torch.arange(k)[None] >= n_keys[:, None]] = 1
    small = 0.3 / (1.0 + 3.0 * spread)
    problem = Problem(
        q_latent=(torch.randn(heads, tokens, latent, generator=made) * small).to(q).transpose(0, 1),  # tokens and heads swapped in memory
        q_rope=(torch.randn(tokens, heads, 3 * rope, generator=made) * 0.3).to(q)[:, :, rope : 2 * rope],
        pool=stored,
        rows=rows,
        sink=torch.randn(heads, generator=made) if sink else None,
        n_keys=n_keys,
    )
    for name in ("pool", "rows", "sink", "n_keys"):
        value = getattr(problem, name)
        setattr(problem, name, None if value is None else value.to(device))
    problem.q_latent = problem.q_latent.to(device)
    problem.q_rope = problem.q_rope.to(device)
    return problem


def error(found, wanted):
    """Largest relative error of a head's output, in the norm; queries without keys count absolutely."""
    return ((found.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1).clamp_min(1e-6)).max().item()
