"""Settings to objects: engines, environments, the learner."""
