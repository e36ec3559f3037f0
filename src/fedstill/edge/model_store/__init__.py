"""The Model Store: what clients remember between rounds, on the device, on the host or on disk."""
