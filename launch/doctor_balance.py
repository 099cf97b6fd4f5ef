"""The doctor's rows on expert balancing: whether experts can move here, and which formats can be read."""

from __future__ import annotations

from importlib.util import find_spec

import torch

Row = tuple[str, str, bool, str]  # kind, name, usable, reason

#: package -> what of expert balancing needs it
_EXTRAS = {
    "pyarrow": ("parquet", "recorded loads and maps as Parquet"),
    "yaml": ("yaml", "maps of TensorRT-LLM"),
    "plotly": ("report", "`rorqual eplb report` as a page"),
}


def balance_rows() -> list[Row]:
    """Planner, moves on the CPU and between GPUs, and the optional formats."""
    gloo, nccl = torch.distributed.is_gloo_available(), torch.distributed.is_nccl_available() and torch.cuda.is_available()
    rows: list[Row] = [
        ("experts", "planner", True, "numpy; `rorqual eplb plan`, --enable-eplb"),
        ("experts", "moves on CPUs", gloo, "gloo, in a group of their own" if gloo else "this torch is built without gloo"),
        ("experts", "moves on GPUs", nccl, "NCCL, in a group of their own" if nccl else "no GPU, or this torch is built without NCCL"),
    ]
    for module, (name, what) in _EXTRAS.items():
        there = find_spec(module) is not None
        rows.append(("experts", name, there, what if there else f"{what}: {module} is not installed (pip install 'rorqual[eplb]')"))
    return rows
