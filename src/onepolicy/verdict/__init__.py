"""Pure rules: bug or mismatch, which, and what to do."""
