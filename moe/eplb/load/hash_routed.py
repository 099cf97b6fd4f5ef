"""Exact load of hash-routed layers: their experts are a fixed function of the token, so no model has to run.

DeepSeek-V4 routes its first layers by a frozen table ``tid2eid`` [vocabulary, choices] of each layer, named by token id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..topology import Ints
from ..trace import LoadTrace

#: number of the layer in the name of its table, as in ``model.layers.0.mlp.gate.tid2eid``
_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\..*tid2eid$")


def token_histogram(token_ids: npt.ArrayLike, vocabulary: int) -> Ints:
    """[vocabulary] how often each token occurs in ``token_ids`` (any shape); ids of -1 are padding.

    Raises:
        ValueError: ids outside the vocabulary.
    """
    ids = np.asarray(token_ids).ravel()
    ids = ids[ids != -1]
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ValueError(f"token ids must be between 0 and {vocabulary - 1} (-1: padding), found {ids.min()} to {ids.max()}")
    return np.bincount(ids, minlength=vocabulary).astype(np.int64)


def hash_load(histogram: npt.ArrayLike, table: npt.ArrayLike, n_experts: int) -> Ints:
    """[experts] choices of the tokens with this ``histogram`` [vocabulary], by one layer's ``table`` [vocabulary, choices].

    Raises:
        ValueError: shapes that do not fit, or a table that names experts that do not exist or one twice for a token.
    """
    many, experts = np.asarray(histogram), np.asarray(table)
    check_table(experts, n_experts)
    if many.shape != experts.shape[:1]:
        raise ValueError(f"token histogram has shape {many.shape} and the table {experts.shape}: needs [vocabulary] and [vocabulary, k]")
    found = np.zeros(n_experts, dtype=np.int64)
    np.add.at(found, experts, many[:, None])
    return found


def check_table(table: npt.NDArray[np.integer], n_experts: int) -> None:
    """Refuse a table that cannot be of ``n_experts`` experts.

    Raises:
        ValueError: naming the first wrong row.
    """
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(f"tid2eid must be integers [vocabulary, choices], found {table.dtype} {table.shape}")
    outside = ((table < 0) | (table >= n_experts)).any(1)
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(f"tid2eid: token {row} names experts {table[row].tolist()}, there are 0 to {n_experts - 1}")
    ordered = np.sort(table, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if twice.any():
        row = int(twice.argmax())
        raise ValueError(f"tid2eid: token {row} names an expert twice: {table[row].tolist()}")


def hash_trace(histograms: npt.ArrayLike, tables: Mapping[int, npt.ArrayLike], n_experts: int) -> LoadTrace:
    """The trace of the hash-routed layers alone.

    Args:
        histograms: [steps, vocabulary] tokens of each step, over all ranks.
        tables: layer number -> its table.
        n_experts: experts of a layer.
    """
    steps = np.atleast_2d(np.asarray(histograms))
    if not tables:
        raise ValueError("hash-routed layers: no table was given")
    layers = sorted(tables)
    counts = np.stack([[hash_load(step, tables[layer], n_experts) for layer in layers] for step in steps])
    choices = {np.asarray(tables[layer]).shape[1] for layer in layers}
    return LoadTrace(
        counts=counts,
        layer_ids=tuple(layers),
        top_k=choices.pop() if len(choices) == 1 else None,
        tokens=steps.sum(1).astype(np.int64),
        meta={"source": "token histogram and tid2eid"},
    )


def fill_hash_layers(trace: LoadTrace, histograms: npt.ArrayLike, tables: Mapping[int, npt.ArrayLike]) -> LoadTrace:
    """The trace with its hash-routed layers added, or filled in where a recorder left them zero.

    Raises:
        ValueError: a layer was recorded and differs from what its table says, or the steps do not fit.
    """
    exact = hash_trace(histograms, tables, trace.n_experts)
    if exact.n_steps != trace.n_steps:
        raise ValueError(f"hash-routed layers: {exact.n_steps} histograms for {trace.n_steps} steps; give one for each step")
    rows = {layer: trace.counts[:, i] for i, layer in enumerate(trace.layer_ids)}
    for i, layer in enumerate(exact.layer_ids):
        recorded = rows.get(layer)
        if recorded is not None and recorded.any() and (recorded != exact.counts[:, i]).any():
            step = int((recorded != exact.counts[:, i]).any(1).argmax())
            raise ValueError(
                f"hash-routed layer {layer}: the recorded counts of step {step} are not those of its tokens; "
                "was padding counted, or is the table of another layer or model?"
            )
        rows[layer] = exact.counts[:, i]
    layers = tuple(sorted(rows))
    return replace(trace, counts=np.stack([rows[layer] for layer in layers], 1), layer_ids=layers)


def read_tables(files: str | Path | Iterable[str | Path]) -> dict[int, Ints]:
    """Layer number -> table [vocabulary, choices], from safetensors files or the folder of a checkpoint.

    Raises:
        ValueError: there is none.
    """
    from safetensors import safe_open

    one = isinstance(files, str | Path)
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    if one and paths[0].is_dir():
        paths = sorted(paths[0].glob("*.safetensors"))
    found: dict[int, Ints] = {}
    for path in paths:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                match = _NAME.search(name)
                if match:
                    found[int(match[1])] = file.get_tensor(name).astype(np.int64)
    if not found:
        where = ", ".join(map(str, paths)) or str(files)
        raise ValueError(f"no table named layers.N...tid2eid in {where}; this model has no hash-routed layers, or they lie in other files")
    return dict(sorted(found.items()))
