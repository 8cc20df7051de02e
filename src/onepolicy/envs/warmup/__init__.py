"""Supervised examples for a tiny policy before RL."""
