"""Pure statistics of two engines' log-probabilities and routes."""
