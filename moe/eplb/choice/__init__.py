"""Which replica of an expert a token goes to: shares of slots, and the tables that ranks read them from."""
