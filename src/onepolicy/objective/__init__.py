"""The objective: rewards -> advantages -> clipped surrogate -> one scalar. Pure torch."""
