"""The vocabulary of a method: trees of tensors, batches, terms, the plan, tasks. Imports nothing of ours but itself."""
