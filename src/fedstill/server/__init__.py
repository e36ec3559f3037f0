"""The server's half: coordinator, device sampler, aggregator."""
