"""A trace replayed under policies of placement: what steps take, what moving costs, what is left of the gain."""
