"""Unmodified transformers models: loading, and onepolicy's attention and experts functions."""
