"""Pools and tables that are larger than the memory there is: refused before anything is allocated, on every rank."""

from __future__ import annotations

import os

import pytest
import torch

from rorqual import LLM
from rorqual.engine import memory
from rorqual.engine.config import EngineConfig
from rorqual.engine.tables import request_table_bytes
from tests.checkpoints import checkpoint, make_checkpoint
from tests.ranks import run_ranks

CPU = torch.device("cpu")
QUIET = {"skip_tokenizer_init": True, "disable_log_stats": True}


def size(config: EngineConfig, free: int, monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> int:
    """Pages of 64 tokens of 100 bytes, with ``free`` bytes of host memory; tables of one slot and two tokens."""
    monkeypatch.setattr(memory, "host_available", lambda: free)
    return memory.size_pool(config, CPU, ranks, max_model_len=2, bytes_per_token=100)


@pytest.mark.parametrize("tokens", [10**12, 2**62, 2**80])
def test_a_pool_that_nothing_holds(tokens):
    with pytest.raises(
        ValueError, match=rf"max_total_tokens {tokens} takes \d+ bytes .* are free in host memory .*; lower it to \d+ or less"
    ):
        LLM(model=str(checkpoint("v32")), device="cpu", max_total_tokens=tokens, **QUIET)


@pytest.mark.parametrize("seqs", [10**12, 2**62, 2**80])
@pytest.mark.parametrize("tokens", [None, 4096])
def test_tables_that_nothing_holds(seqs, tokens):
    said = rf"tables of max_num_seqs {seqs} requests of max_model_len 64 tokens take \d+ bytes, \d+ are free in host memory .*; lower"
    with pytest.raises(ValueError, match=said):
        LLM(
            model=str(checkpoint("v32")), device="cpu", max_num_seqs=seqs, max_model_len=64, max_total_tokens=tokens, **QUIET
        )  # fmt: skip


def test_a_model_that_declares_more_positions_than_tables_have_room_for(tmp_path):
    make_checkpoint(tmp_path / "m", "v32", max_position_embeddings=10**12)
    with pytest.raises(ValueError, match="requests of max_model_len 1000000000000 tokens take .*; lower"):
        LLM(model=str(tmp_path / "m"), device="cpu", **QUIET)


def test_what_was_asked_for_is_refused_from_the_first_page_too_many(monkeypatch):
    config = EngineConfig(max_num_seqs=1, max_total_tokens=64 * 10)
    tables = request_table_bytes(max_num_seqs=1, max_len=2, page_size=64)
    need = 11 * 6400 + tables
    assert size(config, need, monkeypatch) == size(config, 2 * need, monkeypatch, ranks=2) == 10
    said = rf"max_total_tokens 640 takes {11 * 6400} bytes \(10 pages of 64 tokens, and one for padding\), {need - 1 - tables} are free in"
    with pytest.raises(ValueError, match=rf"{said} host memory for each of 1 ranks; lower it to 576 or less, or leave it out"):
        size(config, need - 1, monkeypatch)
    with pytest.raises(ValueError, match="for each of 2 ranks; lower it to 576 or less"):
        size(config, 2 * need - 2, monkeypatch, ranks=2)


def test_without_room_for_a_page_there_is_nothing_to_lower_it_to(monkeypatch):
    config = EngineConfig(max_num_seqs=1, max_total_tokens=64)
    with pytest.raises(ValueError, match="max_total_tokens 64 takes 12800 bytes .*; not one page fits: use more ranks"):
        size(config, 12800, monkeypatch)


def test_memory_of_a_gpu_counts_what_torch_keeps_for_later(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    assert memory.room_of(torch.device("cuda", 1), 4) == (1200, "on cuda:1")
    with pytest.raises(ValueError, match="max_total_tokens 64 takes 12800 bytes .* are free on cuda:1"):
        memory.size_pool(
            EngineConfig(max_num_seqs=1, max_total_tokens=64), torch.device("cuda", 1), 4, max_model_len=2, bytes_per_token=100
        )


def test_tables_on_a_gpu_need_what_the_pool_leaves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 1_000_000))
    config, gpu = EngineConfig(max_num_seqs=1000, gpu_memory_utilization=0.95), torch.device("cuda", 0)
    tables = request_table_bytes(max_num_seqs=1000, max_len=2, page_size=64)
    left = 1_000_000 - 950_000 // 6400 * 6400
    said = (
        f"tables of max_num_seqs 1000 requests of max_model_len 2 tokens take {tables} bytes, {left} are free on cuda:0 beside the KV pool"
    )
    with pytest.raises(ValueError, match=f"{said}; lower max_num_seqs or max_model_len, or gpu_memory_utilization"):
        memory.size_pool(config, gpu, 1, max_model_len=2, bytes_per_token=100)


def short_on_the_second(settings: dict[str, int]) -> str:
    """What an engine says where only rank 1 has too little memory."""
    if int(os.environ["RANK"]) == 1:
        memory.host_available = lambda: 64 << 20
    with pytest.raises(ValueError) as caught:
        LLM(model=str(checkpoint("v32")), device="cpu", pipeline_parallel_size=2, **QUIET, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_total_tokens": 1 << 20}, "max_total_tokens 1048576 takes"),
        ({"max_num_seqs": 1 << 15}, "tables of max_num_seqs 32768 requests"),
    ],
)
def test_every_rank_refuses_what_one_has_no_room_for(settings, said):
    first, second = run_ranks(short_on_the_second, 2, settings, timeout=120.0)
    assert second.startswith(said) and first == f"rank 1: {second}"
