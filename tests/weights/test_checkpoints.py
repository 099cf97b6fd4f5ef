from __future__ import annotations

import json

import pytest
import torch

from tests.checkpoints import NAMES, TINY, checkpoint, hf_greedy, hf_logits, hf_model, make_checkpoint, stable_indexer, tiny_tokenizer

TOKENS = torch.randint(3, 512, (64,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_oracle_loads_what_was_made(name: str) -> None:
    model = stable_indexer(hf_model(checkpoint(name)))
    logits = hf_logits(model, TOKENS)
    assert logits.shape == (64, 512) and logits.dtype == torch.float32
    margins = logits.topk(2).values
    assert logits.std() > 1 and (margins[:, 0] - margins[:, 1]).median() > 0.1
    assert len(set(logits.argmax(-1).tolist())) > 20
    assert logits.argmax(-1)[-1] == hf_greedy(model, TOKENS, 1)[0]
    norm = model.model.layers[1].input_layernorm.weight
    assert norm.std() > 0.1
    if name not in ("v2", "v2_no_q_lora", "v2_groups"):
        assert model.model.layers[1].mlp.gate.e_score_correction_bias.std() > 0.02


def test_cached_seeded_and_overridable() -> None:
    assert checkpoint("v3") == checkpoint("v3") != checkpoint("v3", seed=1)
    wide = checkpoint("v3", vocab_size=4096, tokenizer=True)
    assert json.loads((wide / "config.json").read_text())["vocab_size"] == 4096
    assert (wide / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()


def test_same_seed_same_bytes(tmp_path: object) -> None:
    again = make_checkpoint(tmp_path / "again", "v3")  # type: ignore[operator]
    for file in checkpoint("v3").glob("*.safetensors"):
        assert file.read_bytes() == (again / file.name).read_bytes()
    tiny_tokenizer(again)
    assert (again / "tokenizer_config.json").is_file()


def test_selection_matters_beyond_topk() -> None:
    """A test with a prompt longer than index_topk sees the indexer."""
    model = hf_model(checkpoint("v32"))
    dense = hf_model(checkpoint("v32", index_topk=512))
    difference = (hf_logits(model, TOKENS) - hf_logits(dense, TOKENS)).abs().amax(-1)
    assert difference[:24].max() < 1e-5 and difference[24:].min() > 1e-3


def test_stable_indexer_restores_topk() -> None:
    before = torch.Tensor.topk
    hf_logits(stable_indexer(hf_model(checkpoint("v32"))), TOKENS)
    assert torch.Tensor.topk is before
