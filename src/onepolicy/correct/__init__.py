"""Weight what mismatch is left. Pure torch; the loss multiplies the weights in."""
