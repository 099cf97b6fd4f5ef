"""Who am I, and how is a layer split: the rank grid, groups, sharded layers, the pipeline."""
