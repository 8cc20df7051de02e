"""One training run: the RL step, its repetition, evaluation, log and folder."""
