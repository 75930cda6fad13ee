"""Carries out weight plans: rank to rank, from checkpoint files, and into them."""
