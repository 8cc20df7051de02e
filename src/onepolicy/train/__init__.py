"""The learner: packing, packed forward, optimiser, checkpoints, and the warm start of the tiny policy."""
