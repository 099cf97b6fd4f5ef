"""Tool-call formats: streaming parsers of the ways in which models write function calls."""
