"""The learner on several ranks: FSDP2, with rank 0 as the driver of the other ranks."""
