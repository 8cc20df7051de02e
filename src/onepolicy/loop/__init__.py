"""The algorithm: step.py is one RL step (read it first); train.py repeats it."""
