"""onepolicy inside other trainers: one folder a trainer, on the shared parts in `core/`."""
