"""Objects of a run from its settings: engines, environments, the learner."""
