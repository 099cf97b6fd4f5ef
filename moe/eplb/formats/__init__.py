"""Files of expert loads and placements, of rorqual and of other engines: told apart by their contents, read and written exactly.

Nothing is ever unpickled: ``.pt`` files are read with ``weights_only=True`` and ``.npz`` without objects. Names of keys that other
engines do not document are those of their sources as remembered; on reading, spellings that mean the same are accepted.
"""

from .checks import Problem, drop_zero_layers, problems, zero_layers
from .expert_map import ExpertMap
from .merge import merge, summed
from .registry import FORMATS, read_load, read_map, sniff, write_load, write_map

__all__ = [
    "FORMATS",
    "ExpertMap",
    "Problem",
    "drop_zero_layers",
    "merge",
    "problems",
    "read_load",
    "read_map",
    "sniff",
    "summed",
    "write_load",
    "write_map",
    "zero_layers",
]
