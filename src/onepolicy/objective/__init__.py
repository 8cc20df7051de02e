"""What is optimised: rewards -> advantages -> clipped surrogate -> one scalar. Pure torch."""
