"""Plans that look at where tokens travel: nodes and ranks they touch, experts chosen together."""
