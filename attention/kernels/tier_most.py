"""What the kernels of offloading can count to."""

from __future__ import annotations

#: hot rows of a request: ``resolve_rows`` adds two counts of them up in one int32
MOST_HOT_ROWS = (1 << 15) - 1
#: requests of a step: ``fetch_rows`` sums their counts in the registers of a program
MOST_REQUESTS = 1024
