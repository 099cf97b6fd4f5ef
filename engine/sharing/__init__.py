"""The engine's part in the prefix directory of its host: pages that replicas and engines find at each other's."""
