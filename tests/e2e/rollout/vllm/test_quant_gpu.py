"""vLLM's quantisation with its own kernels, on a GPU, by hand:

    export ONEPOLICY_MODEL=FOLDER
    pytest -m gpu tests/e2e/rollout/vllm/test_quant_gpu.py

FOLDER: a MoE model with its tokenizer, small enough for trainer and engine on one device.
"""

import asyncio
import os

import pytest

from onepolicy.build.components import load_tokenizer_and_max_len
from onepolicy.build.measure import build_engine_and_scorer, measure_config
from onepolicy.config.input_files import resolve_model
from onepolicy.engine_check.command import check_pair
from onepolicy.sync.push import checked_push

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("quant", ["fp8", "int8"])
def test_a_quantised_engine_and_its_sync(quant, capsys):
    """Experts are codes, routes belong to the engine's own tokens, and every sync quantises the
    weights again."""
    model = {"path": os.environ["ONEPOLICY_MODEL"], "dtype": "bfloat16"}
    rollout = {"engine": {"kind": "vllm", "dtype": "bfloat16"}, "quant": quant}
    config = measure_config(
        {"model": model, "rollout": rollout, "train": {"device": "cuda"}}, [], None
    )
    source = resolve_model(config.model)
    tokenizer, max_len = load_tokenizer_and_max_len(config, source)
    pair = build_engine_and_scorer(config, source, max_len)
    parts = {part.part: part for part in pair.engine.caps.sizes.parts}
    assert parts["experts"].bytes_after < 0.6 * parts["experts"].bytes_before
    vocab = pair.scorer.vocab_size
    asyncio.run(checked_push(pair.scorer, pair.engine, vocab=vocab))
    found = asyncio.run(check_pair(pair, tokenizer, source))
    with capsys.disabled():
        print(
            "\n" + pair.engine.caps.sizes.describe(),
            *(f"{check.name}: {check.found}" for check in found),
            sep="\n",
        )
    assert [check.name for check in found if check.passed is False] == []
