"""The processes of a run: ranks, restarts, Ray."""
