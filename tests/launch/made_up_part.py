"""A part of a run as tests need it: ``python -m made_up_part CODE OUT`` runs the code, in which ``rows()`` leaves a row."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROW = '[{"name": "x", "params": {}, "value": 1.5, "unit": "s", "better": "lower", "met": null}]'


def rows(text: str = ROW) -> None:
    """Leave ``text`` where rows are looked for."""
    Path(sys.argv[2]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    exec(sys.argv[1], {"rows": rows, "rank": os.environ.get("RANK", "0"), **{m.__name__: m for m in (os, signal, subprocess, sys, time)}})
