"""Quantised weights for the embedded engine: number formats, layers, experts, embeddings."""
