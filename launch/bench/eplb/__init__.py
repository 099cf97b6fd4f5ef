"""Planners of expert placement against DeepSeek's EPLB and against bounds; needs no GPU."""
