"""Model definitions, free of ranks: they know shapes only."""
