"""Commands about the balance of experts: from a recorded load to a plan, a simulation and a report."""
