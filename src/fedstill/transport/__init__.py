"""The Communication Manager: messages between server and edges, and what carries them."""
