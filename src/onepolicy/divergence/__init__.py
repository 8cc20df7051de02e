"""Pure statistics of the distance between two engines' log-probabilities and routes."""
