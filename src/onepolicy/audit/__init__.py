"""Audits of any framework's dump of tokens and log-probabilities (docs/audit.md)."""
