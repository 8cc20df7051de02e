"""Tokens that two sides scored: one noun, its readers and writers, and its statistics."""
