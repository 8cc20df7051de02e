"""Unmodified transformers models: loading them, and the two functions of ours they are run with on the trainer's side."""
