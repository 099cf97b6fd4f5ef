"""Routings, fake experts and reference results, under the names that tests know them by."""

from rorqual.launch.bench.comm.checks.inputs import KINDS, exact, expert, magnitude, make_ids, make_tokens, run_experts
from rorqual.launch.bench.comm.checks.party import whole_trip

__all__ = ["KINDS", "exact", "expert", "magnitude", "make_ids", "make_tokens", "run_experts", "whole_trip"]
