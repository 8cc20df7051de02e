"""Any framework's dump of tokens and log-probabilities in, a verdict out. docs/audit.md has the columns of a dump."""
