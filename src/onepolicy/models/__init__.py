"""Unmodified transformers models: loading them, and the attention and experts functions of ours they run with."""
