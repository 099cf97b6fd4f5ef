"""Sparse attention: the plain version against its formula, the portable kernels in the interpreter, what the kernels compile to."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import sparse_attention_torch as twin
from rorqual.attention.kernels.sparse_decode import DecodeConfig, plan, sparse_attention
from tests.attention.kernels.sparse_problem import error, make
from tests.kernels.interpreter import repair
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports

repair()
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def config(kernel, splits, heads=16, keys=16):
    return DecodeConfig(kernel=kernel, heads=heads, keys=keys, splits=splits, warps=4, stages=2)


def agree(problem, launch, tolerance):
    out, lse = sparse_attention(*problem.tensors, **problem.options, config=launch)
    wanted, wanted_lse = twin.evaluate(*problem.tensors, **problem.options, compute=torch.float64)
    assert error(out, wanted) <= tolerance
    assert (out[-1] == 0).all() and (lse[-1] == float("-inf")).all()
    assert torch.equal(torch.isinf(lse), torch.isinf(wanted_lse))
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=max(tolerance, 1e-5))


@pytest.mark.parametrize("pool", ["fp8", torch.float32])
def test_plain_version_follows_the_formula(pool):
    problem = make(3, 4, 24, latent=144, rope=16, pool=pool)
    out, lse = twin.sparse_attention(*problem.tensors, **problem.options)
    token = 1
    rows = problem.rows[token, : problem.n_keys[token]]
    rows = rows[(rows >= 0) & (rows < len(problem.pool))].long()
    keys = (twin.decode_latent(problem.pool[rows], 144) if pool == "fp8" else problem.pool[rows]).double()
    scores = 0.1 * (problem.q_latent[token].double() @ keys[:, :144].T + problem.q_rope[token].double() @ keys[:, 144:].T)
    weights = torch.softmax(torch.cat((scores, problem.sink[:, None].double()), 1), 1)[:, :-1]
    torch.testing.assert_close(out[token].double(), weights @ keys[:, :144], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[token].double(), torch.logsumexp(scores, 1), rtol=1e-5, atol=1e-5)
    assert not out.isnan().any() and (out[0] == 0).all() and (lse[0] == float("-inf")).all()


def test_empty_pool_gives_zeros():
    problem = make(2, 4, 8, latent=32, rope=16, pool=torch.float32)
    out, lse = twin.sparse_attention(problem.q_latent, problem.q_rope, problem.pool[:0], problem.rows, scale=1.0)
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_rope": lambda p: p.q_rope.half()}, "must be the same of"),
        ({"q_rope": lambda p: p.q_rope[:, :2]}, "same tokens and heads"),
        ({"rows": lambda p: p.rows.long()}, "int32"),
        ({"pool": lambda p: p.pool[:, :-4]}, "uint8"),
        ({"sink": lambda p: p.sink[:2]}, "sink"),
        ({"n_keys": lambda p: p.n_keys.long()}, "n_keys"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    problem = make(2, 4, 8, latent=32, rope=16)
    for name, value in change.items():
        setattr(problem, name, value(problem))
    for operation in (twin.sparse_attention, sparse_attention):
        with pytest.raises(ValueError, match=message):
            operation(*problem.tensors, **problem.options)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("latent", "rope", "pool"), [(48, 16, torch.float32), (144, 8, "fp8"), (128, 32, torch.float16)])
def test_general_kernel(latent, rope, pool, splits):
    agree(make(3, 5, 40, latent=latent, rope=rope, pool=pool), config("rows", splits), 2e-6)


@interpreted
@pytest.mark.parametrize(("splits", "spread"), [(1, 0.0), (3, 2.0)])
def test_fp8_kernel_keeps_any_scales(splits, spread):
    agree(make(3, 20, 40, latent=256, rope=32, q=torch.float16, spread=spread), config("fp8", splits), 1.5e-3)


@interpreted
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("sink", [True, False])
def test_options(sink, counts):
    agree(make(2, 1, 20, latent=32, rope=16, pool=torch.float32, sink=sink, counts=counts), None, 2e-6)


@interpreted
def test_no_keys_and_no_tokens():
    problem = make(2, 4, 8, latent=32, rope=16, pool=torch.float32, counts=False)
    problem.rows = problem.rows[:, :0]
    out, lse = sparse_attention(*problem.tensors, **problem.options)
    assert (out == 0).all() and (lse == float("-inf")).all()
    out, lse = sparse_attention(problem.q_latent[:0], problem.q_rope[:0], problem.pool, problem.rows[:0], scale=1.0)
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4)


@interpreted
def test_nan_of_a_key_shows():
    problem = make(2, 4, 20, latent=32, rope=16, pool=torch.float32, counts=False)
    problem.rows[0, 3] = 1
    for splits in (1, 2):
        out, lse = sparse_attention(*problem.tensors, **problem.options, config=config("rows", splits))
        assert out[0].isnan().all() and lse[0].isnan().all() and not out[1].isnan().any()


def test_splits_follow_shapes_alone():
    for tokens in (1, 8, 64, 1000):
        for k in (1, 64, 1000, 2048):
            chosen = plan(tokens, 16, k, 256, 64, torch.bfloat16, torch.uint8, True)
            tiles = -(-k // chosen.keys)
            each = -(-tiles // chosen.splits)
            assert 1 <= chosen.splits <= tiles and (chosen.splits - 1) * each < tiles  # no split without a tile


POINTERS = {
    "q_latent": "*bf16",
    "q_rope": "*bf16",
    "pool": "*u8",
    "rows": "*i32",
    "n_keys": "*i32",
    "sink": "*fp32",
    "out": "*fp32",
    "lse": "*fp32",
}
SIZES = ("has_sink", "has_count", "n_rows", "k", "heads", "splits", "keys_per_split")
STRIDES = ("latent_token", "latent_head", "rope_token", "rope_head", "pool_row", "rows_token")
TYPES = POINTERS | dict.fromkeys(SIZES, "i32") | {"factor": "fp32"} | dict.fromkeys(STRIDES, "i32")
ALIGNED = tuple(name for name in TYPES if name not in (*SIZES, "factor", "rows_token", "n_keys", "sink"))
FLAGS = {"PARTS": True}


def spec(kernel, warps, pool="*u8", **constants):
    gluon = kernel in ("few", "wide")
    return Spec(
        fn=f"rorqual.attention.kernels.sparse_decode_{kernel}:sparse_decode_{kernel}_kernel",
        signature=TYPES | {"pool": pool},
        constexprs=FLAGS | constants,
        aligned=ALIGNED,
        gluon=gluon,
        options={"num_warps": warps} | ({} if gluon else {"num_stages": 2}),
    )


SPECS = {
    "few": spec("few", 4, HB=16, STAGES=4, SECOND_REGS=208, LOAD_REGS=80),
    "wide": spec("wide", 4, VALUE_REGS=168, LOAD_REGS=128),
}


@pytest.fixture(scope="module")
def reports():
    return dict(zip(SPECS, compile_reports(list(SPECS.values())), strict=True))


@pytest.mark.parametrize("kernel", SPECS)
def test_compiles_to_warpgroup_products(reports, kernel):
    report = reports[kernel]
    assert report.count("HGMMA") >= 40 and report.count("HMMA") == 0
    assert report.shared <= SMEM_LIMIT
    assert report.spill_bytes <= 64  # addresses; no accumulators
