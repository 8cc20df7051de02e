"""Run folder -> one HTML file, or a table in the terminal. Rollout red, trainer blue, replay green in every figure."""
