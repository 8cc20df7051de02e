"""The learner on several ranks: FSDP2. Rank 0 runs the loop; all ranks make its calls."""
