"""The embedded engine: an unmodified transformers model over a cache of keys, values, routes."""
