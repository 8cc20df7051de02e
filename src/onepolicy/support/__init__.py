"""Sampling supports: the tokens that each sampled token was drawn from."""
