"""A learner that has weights and nothing else."""


class FakeLearner:
    def __init__(self, model, version=5):
        self.model, self.version = model, version

    def named_weights(self, dtype=None):
        yield from self.model.state_dict().items()
