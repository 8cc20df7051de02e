"""A real vLLM server loads a run's adapters by name, and a fault of their sync is named."""

import asyncio
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.build.components import build_components
from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.run.loop import start_adapter
from onepolicy.run.step import StepRunner, push_and_check
from support.adapter_faults import (
    FAULTS,
    POLICY,
    SYNCS,
    entries_there,
    first_seen,
    planted,
    settings,
    update,
)
from support.vllm_engines import ServerProcess, recipe, serving_adapters
from support.vllm_engines import rows as metrics_of

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(1800)]
ADAPTERS = ("lora_rank=16",)
NATIVE = [
    "train.lora.rank=4",
    'train.lora.targets=["attention"]',
    "train.lora.sync=native",
    "optim.lr=1e-2",
    "objective.entropy_coef=0.3",  # random weights earn nothing; this moves the adapter
]


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    made = ServerProcess(folders[0], log, settings=ADAPTERS)
    try:
        yield made.wait_until_ready()
    finally:
        made.stop()


def parts_of(folder, url):
    torch.set_num_threads(1)
    chosen = settings(folder, "vllm-server", "native", "float32", url=url, retries=1)
    return build_components(chosen)[0]


async def loaded(engine):
    models = await engine.client.get("/v1/models")
    return [card["id"] for card in models["data"] if card["parent"] is not None]


def assert_delivered(metrics):
    """A float32 server computes what the trainer does."""
    assert metrics["adapter/delivered"] == pytest.approx(1, abs=0.01)
    assert metrics["adapter/gap"] < 1e-3 * metrics["adapter/effect"]


def test_an_adapter_is_loaded_anew_after_every_update(server, folders):
    """Also on a server whose start-up weights are not the run's."""
    for number, folder in enumerate(folders):
        components = parts_of(folder, server.url)
        assert asyncio.run(first_seen(components, None)) == (None, "")
        assert asyncio.run(loaded(components.engine)) == ["lora-faults@3"]
        assert components.engine.has_initial_checkpoint(str(folder)) is False
        update(components.learner)
        assert_delivered(asyncio.run(push_and_check(components)))
        assert asyncio.run(loaded(components.engine)) == ["lora-faults@4"], number


NAMED = {
    "base weights sampled": "samples with the frozen weights",
    "never named": "was given the adapter 'lora-faults', but a reply names None",
}


def test_a_fault_is_named_at_once(server, folders, subtests):
    for fault, words in NAMED.items():
        with subtests.test(fault):
            step, message = asyncio.run(first_seen(parts_of(folders[0], server.url), fault))
            assert step == 1
            assert words in message


def test_a_rank_that_the_server_does_not_take_is_refused(server, folders):
    config = settings(folders[0], "vllm-server", "native", "float32", url=server.url)
    lora = config.train.lora.model_copy(update={"rank": 17})
    train = config.train.model_copy(update={"lora": lora})
    with pytest.raises(UsageError, match=r"train.lora.rank: 17, but .* takes adapters of rank 16"):
        build_components(config.model_copy(update={"train": train}))


def check_steps(tmp_path, count):
    steps = [row for row in metrics_of(tmp_path) if "mismatch/k3" in row]
    file = tmp_path / "run" / "checkpoints" / "step_00002" / "adapter_model.safetensors"
    size = sum(tensor.nbytes for tensor in load_file(file).values())
    assert len(steps) == count
    for row in steps:
        assert row["mismatch/k3"] < 1e-6  # float32 on both sides
        assert row["rollout/requests_retried"] == row["rollout/requests_dropped"] == 0
        assert row["sync/gib"] * 2**30 == size
    assert_delivered(steps[-1])


@pytest.fixture
def started(tmp_path):
    """Return start(folder, before=None), which starts a server that takes adapters, or one in
    place of `before`, which it kills."""
    servers = []

    def start(folder, before=None):
        port = None
        if before is not None:
            before.kill()
            port = before.port
        log = tmp_path / f"log{len(servers)}"
        servers.append(ServerProcess(folder, log, port, settings=ADAPTERS))
        return servers[-1].wait_until_ready()

    yield start
    for each in servers:
        each.kill()


@pytest.mark.slow
def test_a_run_trains_and_resumes_on_a_restarted_server(started, folders, tmp_path):
    server = started(folders[0])
    assert main(["train", str(recipe(tmp_path, folders[0], server)), *NATIVE]) == 0
    check_steps(tmp_path, 2)
    started(folders[0], server)
    assert main(["train", "--resume", str(tmp_path / "run"), "steps=4"]) == 0
    check_steps(tmp_path, 4)


@pytest.mark.slow
def test_a_server_that_restarts_within_a_run_gets_the_adapter_again(started, folders):
    server = started(folders[1])
    components = parts_of(folders[0], server.url)
    learner = components.learner
    asyncio.run(start_adapter(components, print))
    update(learner)
    asyncio.run(push_and_check(components))
    started(folders[1], server)
    update(learner)

    async def push():
        return await push_and_check(components)

    assert_delivered(asyncio.run(StepRunner(components, []).with_recovery(push)))
    assert asyncio.run(loaded(components.engine)) == ["lora-faults@2"]


@pytest.mark.slow
def test_each_of_two_servers_gets_the_adapter(server, started, folders):
    components = parts_of(folders[0], [server.url, started(folders[1]).url])
    assert asyncio.run(first_seen(components, None)) == (None, "")
    for member in components.engine._all:
        assert asyncio.run(loaded(member.engine)) == ["lora-faults@3"]
    update(components.learner)
    assert_delivered(asyncio.run(push_and_check(components)))
    assert all(member.last_used > 0 for member in components.engine._all)


@pytest.fixture(scope="module")
def table_server():
    with serving_adapters(POLICY) as made:
        yield made


@pytest.mark.slow
def test_the_table_of_planted_failures(table_server, subtests):
    for sync, fault in product(SYNCS, FAULTS):
        with subtests.test(fault, sync=sync):
            found = planted(POLICY, "vllm-server", sync, fault, url=table_server.url)
            assert {step for step, _ in found["named"]} == {0}
            assert found in entries_there()
