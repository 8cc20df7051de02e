"""Games of textarena, of which there is a stand-in here."""

import random
import sys
from types import SimpleNamespace

import pytest

from onepolicy.config import TextArenaTask
from onepolicy.envs.adapters.textarena import TextArenaGame

MOVE, TEXT = "a move", "a text"


class Guessing:
    """Tells its players, seed and secret, then each move and the answer to it."""

    def reset(self, num_players, seed):
        self.secret = random.randrange(10**6)
        self.told = [(-1, f" {num_players} player, seed {seed} ", TEXT), (-1, "Guess.", TEXT)]

    def get_observation(self):
        told, self.told = self.told, []
        return 0, told

    def step(self, move):
        self.told = [(0, move, MOVE), (-1, str(random.random()), TEXT)]
        return move == str(self.secret), {}

    def close(self):
        return {0: 0.5}, {}


@pytest.fixture
def game(monkeypatch):
    kinds = SimpleNamespace(PLAYER_ACTION=MOVE)
    made = SimpleNamespace(make=lambda name, **_: Guessing(), ObservationType=kinds)
    monkeypatch.setitem(sys.modules, "textarena", made)
    return TextArenaGame(TextArenaTask(game="Guessing-v0"))


def test_a_game_has_one_player_and_its_own_random_numbers(game):
    played, outer = [], random.Random(4)
    for seed in (7, 7, 8):
        random.seed(outer.random())
        assert game.reset(seed) == f"1 player, seed {seed}\n\nGuess."
        secret = game.env.secret
        random.random()
        played.append((secret, *game.step("0"), *game.step(str(secret))))
    assert played[0] == played[1] != played[2]
    (_, _, lost, going, _, won, over) = played[0]
    assert (lost, going, won, over) == (0.0, False, 0.5, True)
