"""A recording gateway: an agent program's conversations as exact token paths."""
