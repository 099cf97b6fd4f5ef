"""The tokenizer of the tiny model without its chat template: the folder of a model with DeepSeek-V3.2's own chat format."""

import json
from pathlib import Path

from tests.server.fake_engine import TINY


def make_v32_folder(path: Path) -> str:
    """Fill ``path`` and return it."""
    (path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    return str(path)
