"""Which requests run in a step: admission, pages, the prefix tree, preemption."""
