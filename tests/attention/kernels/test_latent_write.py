"""The fused latent write against its twin, and the twin against the modules it stands for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import latent_write, latent_write_torch
from rorqual.attention.kv.layout import fp8_latent_bytes, n_scales
from rorqual.attention.kv.rows import FloatRows, Fp8LatentRows
from rorqual.attention.norm import RMSNorm
from rorqual.attention.rope import rotate
from tests.attention.kernels.fused import codes_agree, gains, noise, places, turns
from tests.kernels import casts
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports

casts.repair()
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
N_ROWS = 24
SHAPES = [(512, 64), (128, 32), (48, 6), (192, 16)]


def empty_pool(kind: str, latent: int, rope: int) -> torch.Tensor:
    """A pool full of NaN."""
    if kind == "fp8":
        return torch.full((N_ROWS, fp8_latent_bytes(latent, rope)), 0xFF, dtype=torch.uint8)
    return torch.full((N_ROWS, latent + rope), float("nan"), dtype=getattr(torch, kind))


def pools_agree(got: torch.Tensor, expected: torch.Tensor, latent: int, *, exact: bool) -> None:
    """Rows bit-equal, or (not ``exact``) to the rounding of the norm's sum."""
    if got.dtype != torch.uint8:
        torch.testing.assert_close(
            got, expected, rtol=0 if exact else 2**-7 if got.dtype == torch.bfloat16 else 2e-6, atol=0, equal_nan=True
        )
        return
    if exact:
        assert torch.equal(got, expected)
        return
    codes_agree(got[:, :latent], expected[:, :latent])
    middle = slice(latent, latent + 4 * n_scales(latent))
    scales = [pool[:, middle].contiguous().view(torch.float32) for pool in (got, expected)]
    torch.testing.assert_close(*scales, rtol=8e-3, atol=0, equal_nan=True)
    keys = [pool[:, middle.stop :].contiguous().view(torch.bfloat16) for pool in (got, expected)]
    torch.testing.assert_close(*keys, rtol=2**-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", ["fp8", "bfloat16", "float32"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_twin_is_what_the_modules_do(kind, given, interleaved):
    latent, rope, tokens = 192, 16, 9
    kv, turn, rows = noise(tokens, latent + rope, dtype=given), turns(tokens, rope), places(tokens, N_ROWS)
    norm = RMSNorm(latent)
    norm.weight.data = gains(latent, dtype=given)
    if kind == "fp8":
        store = Fp8LatentRows(N_ROWS, 1, latent, rope, torch.float32, kv.device)
    else:
        store = FloatRows(N_ROWS, 1, latent + rope, getattr(torch, kind), torch.float32, kv.device)
    store.rows.copy_(empty_pool(kind, latent, rope))
    key = rotate(kv[:, latent:], torch.view_as_complex(turn), interleaved=interleaved).to(given)
    store.write(rows, torch.cat((norm(kv[:, :latent]), key), -1).detach())
    pool = empty_pool(kind, latent, rope)
    latent_write_torch.write_latent(kv, norm.weight.data, norm.eps, turn, rows, pool, interleaved=interleaved)
    pools_agree(pool, store.rows, latent, exact=True)


@on_cpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "given", "weights", "interleaved", "tokens"),
    [
        ("fp8", torch.bfloat16, torch.bfloat16, True, 5),
        ("fp8", torch.bfloat16, torch.float32, False, 1),
        ("fp8", torch.float32, torch.float32, True, 1),
        ("bfloat16", torch.bfloat16, torch.bfloat16, False, 1),
        ("bfloat16", torch.float32, torch.float32, True, 5),
        ("float32", torch.float32, torch.float32, False, 5),
    ],
)
def test_the_kernel_is_the_twin(shape, kind, given, weights, interleaved, tokens):
    latent, rope = shape
    kv = noise(tokens, latent + rope, dtype=given, gap=16)
    weight, turn, rows = gains(latent, dtype=weights), turns(tokens, rope), places(tokens, N_ROWS, skip=4 if tokens > 1 else 0)
    got, expected = empty_pool(kind, latent, rope), empty_pool(kind, latent, rope)
    latent_write.write_latent(kv, weight, 1e-6, turn, rows, got, interleaved=interleaved)
    latent_write_torch.write_latent(kv, weight, 1e-6, turn, rows, expected, interleaved=interleaved)
    pools_agree(got, expected, latent, exact=False)


@on_cpu
def test_several_tokens_a_program(monkeypatch):
    monkeypatch.setattr(latent_write, "_config", lambda tokens: {"TOKENS": 4, "num_warps": 4})
    tokens, (latent, rope) = 6, SHAPES[1]
    kv, weight, turn, rows = noise(tokens, latent + rope), gains(latent), turns(tokens, rope), places(tokens, N_ROWS, skip=3)
    got, expected = empty_pool("fp8", latent, rope), empty_pool("fp8", latent, rope)
    latent_write.write_latent(kv, weight, 1e-6, turn, rows, got, interleaved=True)
    latent_write_torch.write_latent(kv, weight, 1e-6, turn, rows, expected, interleaved=True)
    pools_agree(got, expected, latent, exact=False)


@on_cpu
def test_zeros_and_no_tokens():
    latent, rope = SHAPES[1]
    for tokens in (0, 2):
        kv = torch.zeros(tokens, latent + rope)
        got, expected = empty_pool("fp8", latent, rope), empty_pool("fp8", latent, rope)
        arguments = (kv, gains(latent), 1e-6, turns(tokens, rope), places(tokens, N_ROWS))
        latent_write.write_latent(*arguments, got, interleaved=True)
        latent_write_torch.write_latent(*arguments, expected, interleaved=True)
        pools_agree(got, expected, latent, exact=True)


def test_compiles_for_hopper():
    signature = {
        "kv": "*bf16",
        "weight": "*bf16",
        "turn": "*fp32",
        "rows": "*i64",
        "pool": "*u8",
        "n_tokens": "i32",
        "stride": "i32",
        "eps": "fp32",
    }
    shape = {"C": 512, "R": 64, "GROUPS": 4, "GROUP": 128, "BLOCK_R": 64, "INTERLEAVED": True, "FP8": True}
    aligned = ("kv", "weight", "turn", "rows", "pool", "stride")
    specs = [
        Spec(
            fn="rorqual.attention.kernels.latent_write:write_latent_kernel",
            signature=signature,
            constexprs={**shape, "TOKENS": tokens, "EARLY": True},
            aligned=aligned,
            options={"num_warps": 4},
        )
        for tokens in (1, 4)
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
