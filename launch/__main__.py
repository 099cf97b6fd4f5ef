"""``python -m rorqual.launch``: the same as ``rorqual``, and what torchrun runs."""

from __future__ import annotations

import os
import sys

from .cli import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)  # the other ranks may be inside a collective with this one: leave without waiting for them
    sys.exit(code)
