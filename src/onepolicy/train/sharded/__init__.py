"""The learner on several ranks: FSDP2, one rank drives the others."""
