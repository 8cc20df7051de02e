"""AdamW whose state rests in host memory or in 8 bits computes what AdamW computes."""

import copy

import pytest
import torch
from torch import nn

from onepolicy.config import UsageError
from onepolicy.config.model import OptimConfig
from onepolicy.train import eight_bit_adamw, streamed_adamw
from onepolicy.train.optim import MASTER, MasterAdamW
from onepolicy.train.optimizers import adamw

CPU = torch.device("cpu")
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def model_of(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 3)).to(dtype)


def optimizer_of(model, state) -> MasterAdamW:
    return adamw(model, OptimConfig(state=state, **SETTINGS), CPU)


def train(model, optimizer, steps, *, seed=0):
    """Make some steps with random gradients. The second parameter has none in every other step."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for index, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None
            if index != 1 or step % 2:
                parameter.grad = gradient.to(parameter.grad_dtype)
        optimizer.step()


def assert_equal(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1, 100_000, 2**30])
def test_state_on_the_host_gives_the_same_bits(dtype, bucket, monkeypatch):
    """In buckets of one parameter, of several, and of all."""
    monkeypatch.setattr(streamed_adamw, "BUCKET_BYTES", bucket)
    usual, host = model_of(dtype), model_of(dtype)
    train(usual, optimizer := optimizer_of(usual, "device"), 5)
    train(host, streamed := optimizer_of(host, "host"), 5)
    assert_equal(usual, host)
    for p, q in zip(usual.parameters(), host.parameters(), strict=True):
        assert optimizer.state[p].keys() == streamed.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, streamed.state[q][key])
    assert streamed.param_groups[0]["params"] == list(host.parameters())


def test_every_bucket_is_waited_for_and_the_last_one_too(monkeypatch):
    """What the streams of a GPU are told, here without streams."""
    told = []

    class Recorded(streamed_adamw.CopyStreams):
        def fetching(self):
            told.append("fetch")
            return super().fetching()

        def wait_for_fetched(self, fetched):
            told.append("wait")

        def putting_back(self):
            told.append("put back")
            return super().putting_back()

        def finish(self):
            told.append("finish")

    monkeypatch.setattr(streamed_adamw, "CopyStreams", Recorded)
    monkeypatch.setattr(streamed_adamw, "BUCKET_BYTES", 1)
    model = model_of()
    train(model, optimizer_of(model, "host"), 1)  # five of six parameters have a gradient
    assert told == ["fetch", "wait", "put back"] * 5 + ["finish"]


def saved_and_loaded(before, after, steps, dtype=torch.float32):
    """Return a model with its optimizer, a copy with one loaded from the other's state, and the
    (saved, loaded) values."""
    model = model_of(dtype)
    train(model, saved := optimizer_of(model, before), steps)
    continued, values = copy.deepcopy(model), []
    loaded = optimizer_of(continued, after)
    for p, q in zip(model.parameters(), continued.parameters(), strict=True):
        for key, value in saved.saved_state(p).items():
            loaded.put_state(q, key, value.clone())
            values.append((value, loaded.saved_state(q)[key]))
    return model, saved, continued, loaded, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [("device", "host"), ("host", "device")])
def test_a_checkpoint_of_one_continues_with_the_other(before, after, dtype):
    model, saved, continued, loaded, _ = saved_and_loaded(before, after, 3, dtype)
    train(model, saved, 3, seed=1)
    train(continued, loaded, 3, seed=1)
    assert_equal(model, continued)


def test_buckets_keep_the_order_and_hold_what_fits(monkeypatch):
    monkeypatch.setattr(streamed_adamw, "BUCKET_BYTES", 12 * 10)
    sizes = [4, 6, 1, 30, 2, 8]
    buckets = streamed_adamw.split_parameters([torch.zeros(n) for n in sizes])
    assert [[t.numel() for t in bucket] for bucket in buckets] == [[4, 6], [1], [30], [2, 8]]


def test_8_bit_state_needs_torchao(monkeypatch):
    monkeypatch.setattr(eight_bit_adamw, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"optim.state: 8bit needs torchao.*adam8bit"):
        eight_bit_adamw.check_installed()


@pytest.fixture
def torchao():
    """Return torchao's optimisers, of the venv of `make test-envs`.

    Where torchao is installed transformers imports it at every start, so .venv has none.
    """
    return pytest.importorskip("torchao.optim")


@pytest.mark.envs
def test_8_bit_state_is_that_of_torchao(torchao):
    """torchao's own optimiser, run without its compiler, on float32 parameters."""
    ours, theirs = model_of(), model_of()
    rates = {"betas": OptimConfig().betas, "eps": OptimConfig().eps}
    oracle = torchao.AdamW8bit(theirs.parameters(), **SETTINGS, **rates)
    train(ours, optimizer := optimizer_of(ours, "8bit"), 6)
    with torch.compiler.set_stance("force_eager"):
        train(theirs, oracle, 6)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p - q).abs().max() < 2e-6
    quantised = [optimizer.state[p]["exp_avg"] for p in ours.parameters()]
    assert [hasattr(value, "codes") for value in quantised] == [True, False] * 2 + [False] * 2


@pytest.mark.envs
def test_8_bit_moments_take_a_quarter(torchao):
    model = model_of(torch.bfloat16)
    train(model, optimizer := optimizer_of(model, "8bit"), 2)
    weight = model[0].weight
    state, count = optimizer.state[weight], weight.numel()
    assert state["exp_avg"].codes.nbytes == count
    assert state["exp_avg_sq"].scale.nbytes == count // 256 * 4
    assert state[MASTER].dtype == torch.float32


@pytest.mark.envs
@pytest.mark.parametrize(("before", "after"), [("8bit", "device"), ("device", "8bit")])
def test_checkpoints_of_8_bit_state_hold_float32(torchao, before, after):
    _, _, continued, loaded, values = saved_and_loaded(before, after, 4)
    for value, again in values:
        assert type(value) is torch.Tensor
        assert (again - value).abs().max() <= 0.02 * value.abs().max()
    train(continued, loaded, 1)


@pytest.mark.parametrize("state", ["device", "host"])
def test_masters_are_the_weights_of_a_float32_fork(state):
    model = model_of()
    optimizer, weight = optimizer_of(model, state), model[0].weight
    master = torch.randn(weight.shape)
    optimizer.put_state(weight, MASTER, master)
    assert torch.equal(weight, master)
    assert MASTER not in optimizer.state[weight]
