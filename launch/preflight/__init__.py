"""``doctor --dist``: can the ranks of a job reach one another, by which interface, and how fast."""
