"""A whole run: settings, the loop over rounds, results, and what is kept on disk."""
