"""EPLB as its description tells it, in plain loops: one copy, which the benchmark times."""

from rorqual.launch.bench.eplb.cases import FLASH, README, README_SHAPE, skewed_load
from rorqual.launch.bench.eplb.peer import eplb, pack, replicate

__all__ = ["FLASH", "README", "README_SHAPE", "eplb", "pack", "replicate", "skewed_load"]
