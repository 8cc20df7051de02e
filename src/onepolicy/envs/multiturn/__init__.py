"""Episodes of several turns."""
