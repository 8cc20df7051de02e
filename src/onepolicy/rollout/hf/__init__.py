"""The embedded engine: an unmodified transformers model over a slab of keys, values and routes."""
