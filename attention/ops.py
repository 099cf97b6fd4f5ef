"""The operations that attention on the fused path is made of: Triton kernels, or their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from ..parallel.backends import needing
from .beside import IN_ORDER, Beside

Op = Callable[..., Any]

#: field of ``AttentionOps`` -> (module in ``kernels``, function); the twin's module has "_torch" appended
_PLACES = {
    "rms_norm": ("norm", "rms_norm"),
    "query_rope": ("query_rope", "query_rope"),
    "write_latent": ("latent_write", "write_latent"),
    "write_index": ("index_write", "write_index"),
    "index_query": ("index_query", "index_query"),
    "indexer_logits": ("indexer_logits", "indexer_logits"),
    "select_rows": ("topk", "select_rows"),
    "sparse_attention": ("sparse_attention", "sparse_attention"),
    "dense_decode": ("dense_decode", "dense_decode"),
    "varlen_attention": ("dense_prefill", "varlen_attention"),
    "gather_latent": ("dense_prefill", "gather_latent"),
    "resolve_rows": ("resolve_rows", "resolve_rows"),
    "fetch_rows": ("fetch_rows", "fetch_rows"),
    "gather_union": ("gather_union", "gather_union"),
    "seed_hot": ("seed_hot", "seed_hot"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionOps:
    """One backend. The functions are those of ``attention.kernels``; their docstrings say shapes and dtypes."""

    name: str  # "auto", "torch", "triton" or "flash_mla"
    rms_norm: Op  # norm of the query latent
    query_rope: Op  # rotation of the queries' last values
    write_latent: Op  # norm, rotation, quantisation and paged write of the latent row
    write_index: Op  # the same of the index key
    index_query: Op  # rotated (and quantised) index queries with their weights
    indexer_logits: Op  # scores of every visible key
    select_rows: Op  # exact top-k, as positions and cache rows
    sparse_attention: Op  # attention over chosen rows
    dense_decode: Op  # absorbed attention over every visible key
    varlen_attention: Op  # expanded attention over every visible key
    gather_latent: Op  # dequantised rows
    resolve_rows: Op  # where chosen rows are, of pages that may be absent
    fetch_rows: Op  # copies of missing rows into hot rows
    gather_union: Op  # chosen rows of one request in a pool of their own
    seed_hot: Op  # the beginning of a hot buffer
    beside: Beside = IN_ORDER  # how fetches run beside the queries' products
    aside: Beside = IN_ORDER  # how the queries' products run beside the choice of keys, in steps of few tokens

    @classmethod
    def load(cls, name: str) -> AttentionOps:
        """The kernels ("triton"), the same with FlashMLA's sparse attention ("flash_mla"; "auto": where it is faster), or the twins
        ("torch").

        Raises:
            ValueError: another name, or the package it needs is not installed.
        """
        if name not in ("auto", "torch", "triton", "flash_mla"):
            raise ValueError(f"attention backend must be auto, torch, triton or flash_mla, found {name!r}")
        suffix = "_torch" if name == "torch" else ""
        with needing(f"attention backend {name!r}", ("triton", "flash_mla"), "--attention-backend torch"):
            found = {field: getattr(import_module(f".kernels.{m}{suffix}", __package__), f) for field, (m, f) in _PLACES.items()}
            if name == "auto":
                found["sparse_attention"] = import_module(".kernels.sparse_attention", __package__).fastest
            if name == "flash_mla":
                found["sparse_attention"] = import_module(".kernels.flash_mla", __package__).sparse_attention
        return cls(name=name, **found)


@lru_cache(maxsize=1)
def twins() -> AttentionOps:
    """The plain twins, for the torch path."""
    return AttentionOps.load("torch")
