"""vLLM samples with the dequantised base of train.lora.base = nf4, or the run stops."""

import asyncio

import pytest

from onepolicy.build.components import build_components
from support.adapter_faults import VLLM, first_seen, settings
from support.vllm_engines import make_checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.process]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("models"))[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dequantised_base_and_every_update_arrive(checkpoint, dtype):
    chosen = settings(checkpoint, "vllm", "merged", dtype, base="nf4", **VLLM)
    components, _ = build_components(chosen)
    assert asyncio.run(first_seen(components, None)) == (None, "")


def test_a_server_gets_it_too_and_one_that_keeps_the_unquantised_base_is_named(
    server, folders, models
):
    chosen = settings(folders[0], "vllm-server", "merged", "float32", base="nf4", url=server.url)
    components, _ = build_components(chosen)
    assert asyncio.run(first_seen(components, None)) == (None, "")
    components, _ = build_components(chosen)
    real = components.engine.load_weights

    async def load(_, version):
        await real(models[0].state_dict().items(), version)

    components.engine.load_weights = load
    step, message = asyncio.run(first_seen(components, None))
    assert step == 0
    assert "samples with the unquantised base" in message


def test_an_engine_that_keeps_the_unquantised_base_is_named_at_the_start(checkpoint):
    chosen = settings(checkpoint, "vllm", "merged", "float32", base="nf4", **VLLM)
    components, _ = build_components(chosen)
    engine = components.engine

    async def load(_, version):
        engine.version = version

    engine.load_weights = load
    step, message = asyncio.run(first_seen(components, None))
    assert step == 0
    assert "VLLMEngine samples with the unquantised base" in message
