"""How far apart are the two engines? Pure functions of their outputs; measuring never changes training."""
