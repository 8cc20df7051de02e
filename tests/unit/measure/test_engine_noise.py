"""Two samplings of the same requests are paired by problem, episode and number in the episode."""

import torch

from onepolicy.measure.attribution import _describe_alone
from onepolicy.measure.engine_noise import compare
from onepolicy.train.pack import pack
from onepolicy.types import Group, Sample

SAME = "100% of their tokens come out the same"


def sample(episode: int, *tokens: int, nats: float = -1.0) -> Sample:
    """Return a path whose first token is the prompt."""
    zeros = torch.zeros(len(tokens) - 1, dtype=torch.int32)
    path, sampled = torch.tensor(tokens, dtype=torch.int32), torch.ones_like(zeros).bool()
    logp = torch.full((len(zeros),), nats)
    return Sample(path, sampled, logp, zeros, zeros, 1.0, 0.0, "stop", episode=episode, outcome=0.0)


def test_episodes_that_are_dropped_or_forked_are_not_taken_for_others():
    """The first sampling dropped episode 0 of problem 7; its episode 1 has two paths, of 2 and 1
    sampled tokens. The second one dropped episode 0 of problem 8 and did not come to problem 9."""
    first = [
        Group(7, (sample(1, 3, 4, 5), sample(1, 3, 6), sample(2, 3, 8))),
        Group(8, (sample(0, 3, 9, 9), sample(1, 3, 4))),
        Group(9, (sample(0, 3, 9),)),
    ]
    second = [
        Group(7, (sample(0, 3, 7), sample(1, 3, 4, 5), sample(1, 3, 6), sample(2, 3, 8, 8))),
        Group(8, (sample(1, 3, 4, nats=-0.5),)),
    ]
    found = compare(first, second, pack(first))
    assert found.played.tolist() == [True, True, True, True, False, False, True, False]
    assert torch.equal(found.same, found.played)
    assert found.logp.tolist() == [-1, -1, -1, -1, -1, -1, -0.5, -1]
    assert found.share == 1  # of the samples that were sampled again


def test_another_token_was_played_and_is_not_the_same():
    first, second = ([Group(7, (sample(0, 3, 4, *end),))] for end in ((5, 6), (8, 6)))
    found = compare(first, second, pack(first))
    assert (found.same.tolist(), found.played.tolist()) == ([True, False, False], [True] * 3)
    assert found.share == 1 / 3


def test_a_bar_of_some_sequences_names_how_many():
    """Problem 8 was not sampled again."""
    first = [Group(p, (sample(0, 3, 4, 5), sample(1, 3, 6))) for p in (7, 8)]
    batch = pack(first)
    how = "the engine samples one sequence at a time"
    some = _describe_alone(compare(first, first[:1], batch), batch)
    assert some == f"{how}, in 2 of 4 sequences, the only ones that this bar can move; {SAME}"
    assert _describe_alone(compare(first, first, batch), batch) == f"{how}; {SAME}"
