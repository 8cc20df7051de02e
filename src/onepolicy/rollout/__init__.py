"""Rollouts: `collect` drives episodes; each engine that samples their tokens has a folder."""
