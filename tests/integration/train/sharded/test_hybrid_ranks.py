"""A recurrent hybrid on two ranks equals the learner of one process, with and without adapters."""

import pytest

from support.families import TABLE
from support.models import VOCAB
from support.rank_cases import QWEN, RECOMPUTE, assert_equal_gradients, assert_equal_steps

pytestmark = pytest.mark.process
CASES = {
    "plain": QWEN,
    "idle_recompute": [*QWEN, "train.tokens_per_micro_batch=15", RECOMPUTE],
}
LORA = [*QWEN, "train.lora.rank=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write two layers of the gated delta rule around one of attention, all with experts."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = {"vocab_size": VOCAB, "num_experts_per_tok": 2}
    TABLE["qwen3_5_moe_text"].model(max_position_embeddings=128, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", [pytest.param("plain", marks=pytest.mark.full), "idle_recompute"])
def test_two_ranks_equal_one(case, two, folder):
    assert_equal_steps(CASES[case], two, folder)


@pytest.mark.full
def test_two_ranks_with_adapters_equal_one(two, folder):
    assert_equal_steps(LORA, two, folder)


def test_gradients_of_adapters_on_two_ranks_are_those_of_one_process(two, folder, monkeypatch):
    assert_equal_gradients(LORA, two, folder, monkeypatch)
