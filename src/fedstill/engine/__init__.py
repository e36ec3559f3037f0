"""The Training Optimizer: trains n ≥ 1 clients for a round, one by one or stacked, and scores models."""
