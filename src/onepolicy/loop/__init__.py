"""The algorithm: step.py is one RL step (read it first); run.py repeats it."""
