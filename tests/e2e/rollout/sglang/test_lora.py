"""SGLang 0.5.23's own server on this CPU loads a run's adapters by name, and a fault of their sync
is named. `make test-sglang`."""

import asyncio
import json
from itertools import product

import httpx2
import pytest
import torch

from onepolicy.build.components import build_components
from onepolicy.cli import main
from onepolicy.config import ModelConfig, TrainingError
from onepolicy.models.load import load_model
from onepolicy.run.step import push_and_check
from onepolicy.train.checkpoint import checkpoint_folder
from onepolicy.types import Sampling
from support.adapter_faults import FAULTS, entries_there, first_seen, planted, settings, update
from support.metrics import rows as metrics_of
from support.sglang_live import ADAPTERS, prompts, recipe, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.process,
    pytest.mark.timeout(900),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    with serving(folders[0], tmp_path_factory.mktemp("sglang") / "log", *ADAPTERS) as url:
        yield url


def parts_of(folder, url, sync="native"):
    torch.set_num_threads(1)
    components, _ = build_components(settings(folder, "sglang", sync, "float32", url=url))
    return components


def loaded(url):
    cards = httpx2.get(f"{url}/v1/models", timeout=60).json()["data"]
    return [card["id"] for card in cards if card["parent"] is not None]


def assert_delivered(metrics):
    """A float32 server computes what the trainer does."""
    assert metrics["adapter/delivered"] == pytest.approx(1, abs=0.01)
    assert metrics["adapter/gap"] < 1e-3 * metrics["adapter/effect"]


@pytest.mark.parametrize("sync", ["native", "merged"])
def test_an_adapter_arrives_after_every_update(server, folders, sync):
    """Also on a server whose start-up weights are not the run's."""
    for folder in folders:
        components = parts_of(folder, server, sync)
        assert asyncio.run(first_seen(components, None)) == (None, "")
        update(components.learner)
        assert_delivered(asyncio.run(push_and_check(components)))
        if sync == "native":
            assert loaded(server) == ["lora-faults@4"]


def test_the_table_of_planted_failures(server, folders, subtests):
    for sync, fault in product(("merged", "native"), FAULTS):
        with subtests.test(fault, sync=sync):
            found = planted(folders[0], "sglang", sync, fault, dtype="float32", url=server)
            assert found in entries_there()


def test_a_name_that_the_server_never_had_is_refused(server, folders):
    components = parts_of(folders[0], server)
    assert asyncio.run(first_seen(components, None)) == (None, "")
    components.engine._adapters.name = "lora-faults@77"
    with pytest.raises(TrainingError, match="has never been loaded: lora-faults@77"):
        asyncio.run(components.engine.generate([5, 4, 3], Sampling(1.0, 4), seed=0))


def test_a_base_in_nf4_reaches_the_server_and_the_unquantised_one_is_named(server, folders):
    chosen = settings(folders[0], "sglang", "merged", "float32", base="nf4", url=server)
    components, _ = build_components(chosen)
    assert asyncio.run(first_seen(components, None)) == (None, "")
    components, _ = build_components(chosen)
    real = components.engine.load_weights

    async def load(_, version):
        base = load_model(ModelConfig(path=str(folders[0])), torch.float32, CPU)
        await real(base.state_dict().items(), version)

    components.engine.load_weights = load
    step, message = asyncio.run(first_seen(components, None))
    assert step == 0
    assert "samples with the unquantised base" in message


# random weights earn nothing; the bonus for entropy moves the adapter
NATIVE = ["steps=2", "eval.every=0", "optim.lr=1e-2", "objective.entropy_coef=0.3"]
NATIVE += ["train.lora.rank=4", "train.lora.sync=native", 'train.lora.targets=["attention"]']


@pytest.fixture(scope="module")
def run(server, folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    assert main(["train", recipe(folders[0], server, out), *NATIVE]) == 0
    return out / "run"


def test_a_run_trains(run):
    steps = [row for row in metrics_of(run) if "mismatch/k3" in row]
    assert len(steps) == 2
    assert all(row["mismatch/k3"] < 1e-6 for row in steps)  # float32 on both sides
    assert_delivered(steps[-1])


@pytest.mark.parametrize("form", ["checkpoint", "exported"])
def test_a_saved_adapter_is_loaded(run, server, folders, tmp_path, form):
    saved = out = checkpoint_folder(run, 2)
    if form == "exported":
        out = tmp_path / "adapter"
        assert main(["export", str(run), "--out", str(out), "--adapter"]) == 0
    post(server, "/load_lora_adapter", lora_name=form, lora_path=str(out))
    merged = load_model(ModelConfig(path=str(saved)), torch.float32, CPU)
    base = load_model(ModelConfig(path=str(folders[0])), torch.float32, CPU)
    for prompt in prompts(4):
        found, ids = greedy(server, prompt, lora_path=form)
        torch.testing.assert_close(found, scored(merged, prompt, ids), atol=2e-4, rtol=0)
        assert (found - scored(base, prompt, ids)).abs().max() > 1e-2
    post(server, "/unload_lora_adapter", lora_name=form)


def post(server, path, **body):
    reply = httpx2.post(server + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return json.loads(reply.text)


def greedy(server, prompt, **adapter):
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    asked = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    reply = post(server, "/generate", **asked, **adapter)
    entries = reply["meta_info"]["output_token_logprobs"]
    return torch.tensor([entry[0] for entry in entries]), reply["output_ids"]


@torch.no_grad()
def scored(model, prompt, ids):
    """Return log-probabilities [n] of the tokens `ids` after the prompt."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logp.gather(-1, torch.tensor(ids)[:, None])[:, 0]
