"""The doctor's section on ways between ranks: NVSHMEM's transports, RDMA devices, MPS, and the environment that steers them."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..comm.deep_ep.package import version as deep_ep_version
from ..comm.nvshmem.library import bindings_version, find, text_of
from ..comm.nvshmem.transports import report

_PREFIXES = ("NVSHMEM_", "CUDA_MPS_", "NCCL_")


def transports() -> list[dict[str, Any]]:
    """Rows of {item, value, note}."""
    rows = [_nvshmem(), {"item": "deep_ep", "value": deep_ep_version() or "no", "note": "library of backends deep_ep and deep_ep_ll"}]
    rows += [
        {"item": f.item, "value": "yes" if f.good else "no", "note": f.note} for f in report(torch.version.cuda) if f.item != "NVSHMEM"
    ]
    rows += [{"item": name, "value": os.environ[name], "note": "environment"} for name in sorted(os.environ) if name.startswith(_PREFIXES)]
    return rows


def _nvshmem() -> dict[str, Any]:
    try:
        library = find(cuda=torch.version.cuda)
        return {"item": "NVSHMEM", "value": text_of(library.version), "note": f"{library.root}; nvshmem4py {bindings_version()}"}
    except ValueError as error:
        return {"item": "NVSHMEM", "value": "no", "note": str(error)}
