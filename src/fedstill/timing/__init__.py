"""Simulated time: devices, when rounds end, asynchronous and wait-free training."""
