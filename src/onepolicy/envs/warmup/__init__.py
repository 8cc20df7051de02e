"""Examples that a tiny policy learns from before RL."""
