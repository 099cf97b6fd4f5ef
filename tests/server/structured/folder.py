"""The embedded model's tokenizer, as an engine's welcome names it."""

from pathlib import Path

import rorqual

FOLDER = str(Path(rorqual.__file__).parent / "launch" / "tiny")
VOCAB = 4096
EOS = [1]
