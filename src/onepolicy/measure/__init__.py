"""`onepolicy measure`: the gap between engine and trainer, and its causes."""
