"""The trainer: packing, the packed forward, scorer, learner, optimiser and checkpoints."""
