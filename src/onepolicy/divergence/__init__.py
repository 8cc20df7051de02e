"""Pure statistics of how far two engines' log-probabilities and routes are apart."""
