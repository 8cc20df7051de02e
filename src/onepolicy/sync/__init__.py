"""Trainer weights -> engine weights."""
