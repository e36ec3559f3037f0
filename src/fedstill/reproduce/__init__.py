"""The papers' tables and figures run again: which cells, at what scale and cost, and what stands beside the published numbers."""
