"""A federation of real sites: a hub and sites as processes that keep their data, carried by NVIDIA FLARE (the extra `deploy`)."""
