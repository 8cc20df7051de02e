"""Readers of engines' route payloads. They need no engine."""
