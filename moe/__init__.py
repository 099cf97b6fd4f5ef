"""Routing, experts in physical slots, and the mixture-of-experts layer."""
