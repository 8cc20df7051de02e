"""Quantised weights for the embedded engine: number formats, linear layers, experts, and what they save."""
