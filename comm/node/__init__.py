"""Expert parallelism over nodes in two hops, by peer memory: a token crosses to a node once, and its result crosses back once."""
