"""Rollout replicas and learner ranks where Ray places them. The only folder that imports ray."""
