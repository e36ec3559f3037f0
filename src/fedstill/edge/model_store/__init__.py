"""The Model Store: what each client keeps between rounds, on the device, on the host or on disk."""
