"""Parts of a sharded learner that need no second process: division of samples, messages,
settings."""

import dataclasses
import json
import logging
import threading
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, dynamic_module_utils

from onepolicy import __version__
from onepolicy.config import ModelConfig, TrainingError, UsageError, resolve
from onepolicy.launch import ranks as launch_ranks
from onepolicy.launch.launcher import apply_torchrun_ranks
from onepolicy.launch.ranks import LaunchedRanks, RankInfo, _await_ranks, launched_ranks
from onepolicy.models.empty import empty_model
from onepolicy.run import train_command
from onepolicy.train.sharded import export
from onepolicy.train.sharded import ranks as ranks_module
from onepolicy.train.sharded.divide import Sizes, assign_micro_batches, idle_batch
from onepolicy.train.sharded.rank import RankScorer
from onepolicy.train.sharded.ranks import RankLost, Ranks, process_key
from onepolicy.train.sharded.wire import Message, batch_from_message, batch_message
from onepolicy.train.shared_prompts import WORTH, share_prompts
from support.token_batches import batch_with


def test_dealt_by_hand():
    """85 slots in micro-batches of at most 30: three would do, so two rounds of two ranks, about 21
    each."""
    lengths = [8, 13, 5, 22, 10, 7, 16, 4]
    dealt = assign_micro_batches(batch_with(lengths), 30, 2)
    slots = [[sum(lengths[s] for s in chosen) for chosen in rank] for rank in dealt]
    assert slots == [[22, 20], [22, 21]]
    assert assign_micro_batches(batch_with([5]), 30, 3) == [[[0]], [[]], [[]]]


def test_checks_by_logits_see_every_sample():
    """`RankScorer.logits` is a call of all ranks, so what reads it walks the whole batch."""
    scorer = SimpleNamespace(batcher=SimpleNamespace(budget=30))
    parts = RankScorer.micro_batches(scorer, batch_with([8, 13, 5, 22, 10, 7, 16, 4]))
    assert sorted(sample for part in parts for sample in part) == list(range(8))


def parts_of(dealt):
    return [part for rounds in dealt for part in rounds]


def check_dealt_once(dealt, lengths, budget, ranks):
    """Check that every rank has as many rounds, and every sample its place within the budget."""
    assert len(dealt) == ranks
    assert len({len(rounds) for rounds in dealt}) == 1
    chosen = parts_of(dealt)
    assert sorted(s for part in chosen for s in part) == list(range(len(lengths)))
    assert all(len(part) < 2 or sum(lengths[s] for s in part) <= budget for part in chosen)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 5))
def test_every_sample_is_dealt_once_within_the_budget(lengths, budget, ranks):
    dealt = assign_micro_batches(batch_with(lengths), budget, ranks)
    check_dealt_once(dealt, lengths, budget, ranks)


def groups_of(prompt, responses, groups):
    """Return groups whose samples share their first `prompt` slots, of these response lengths."""
    batch = batch_with([prompt + n for n in responses] * groups)
    group = torch.arange(groups).repeat_interleave(len(responses))
    first = batch.cu_seqlens[:-1].tolist()
    ids, routes = batch.input_ids.clone(), batch.routing.ids.view(torch.int16).clone()
    for sample, start in enumerate(first):
        leader = first[sample - sample % len(responses)]
        for field in (ids, routes):
            field[start : start + prompt] = field[leader : leader + prompt]
    trace = dataclasses.replace(batch.routing, ids=routes.view(torch.uint16))
    return batch.replace(group=group, input_ids=ids, routing=trace)


def grouped(dealt, size):
    """Return the groups of each micro-batch. size: samples of a group."""
    return [[sorted({s // size for s in part}) for part in rounds] for rounds in dealt]


def test_siblings_stay_on_one_rank_where_that_is_balanced():
    batch = groups_of(20, [5, 4, 3], 4)  # 72 slots a group, 32 of them distinct
    dealt = parts_of(assign_micro_batches(batch, 1000, 2, share=True))
    assert [sorted(part) for part in dealt] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    # in micro-batches of one group: two rounds, as many as before
    dealt = assign_micro_batches(batch, 80, 2, share=True)
    assert sorted(grouped(dealt, 3)) == [[[0], [3]], [[1], [2]]]
    assert len(assign_micro_batches(batch, 80, 2)[0]) == 2


def test_a_group_is_divided_where_ranks_would_be_idle():
    one = groups_of(20, [30, 30, 30, 30], 1)
    for ranks, sizes in ((2, [2, 2]), (4, [1, 1, 1, 1])):
        dealt = assign_micro_batches(one, 1000, ranks, share=True)
        assert [len(part) for part in parts_of(dealt)] == sizes
    # four ranks and two groups: each group in two pieces, not in single samples
    two = assign_micro_batches(groups_of(20, [30, 30, 30, 30], 2), 1000, 4, share=True)
    assert all(len(set(of)) == 1 for (of,) in grouped(two, 4))
    assert [len(part) for part in parts_of(two)] == [2, 2, 2, 2]


def test_groups_without_a_common_prefix_are_dealt_as_single_samples():
    batch = groups_of(0, [8, 13, 5, 22], 3)
    for budget in (30, 1000):
        shared = assign_micro_batches(batch, budget, 2, share=True)
        assert shared == assign_micro_batches(batch, budget, 2)


def test_a_division_does_not_depend_on_the_routes_that_scoring_adds():
    batch = groups_of(20, [5, 4, 3], 4)
    other = batch.routing.ids.view(torch.int16).roll(1, 0).view(torch.uint16)
    scored = batch.replace(routing_native=dataclasses.replace(batch.routing, ids=other))
    before, after = (assign_micro_batches(b, 80, 2, share=True) for b in (batch, scored))
    assert before == after


RESPONSES = st.lists(st.integers(1, 20), min_size=1, max_size=5)


@given(st.integers(0, 20), RESPONSES, st.integers(1, 5), st.integers(1, 90), st.integers(1, 4))
def test_every_sibling_is_dealt_once_within_the_budget(prompt, responses, groups, budget, ranks):
    batch = groups_of(prompt, responses, groups)
    dealt = assign_micro_batches(batch, budget, ranks, share=True)
    check_dealt_once(dealt, batch.cu_seqlens.diff().tolist(), budget, ranks)
    sizes, plain = Sizes.of(batch, share=True), assign_micro_batches(batch, budget, ranks)
    assert slowest(dealt, sizes) <= slowest(plain, sizes)
    rows = sizes.rows(list(range(batch.num_samples)))  # those of the forward
    shared = share_prompts(batch).shared
    if shared is None:
        assert rows > WORTH * batch.num_slots
    else:
        assert rows == len(shared.slots)


def slowest(dealt, sizes):
    """Return the rows of the slowest rank of each round, added up."""
    return sum(max(map(sizes.rows, of_round)) for of_round in zip(*dealt, strict=True))


def test_an_idle_rank_gets_a_sample_that_counts_for_nothing():
    batch = batch_with([5, 3])
    assert assign_micro_batches(batch, 100, 3) == [[[0]], [[1]], [[]]]
    idle = idle_batch(batch)
    assert idle.num_slots == 3
    for mine in (idle.trainable, idle.keep, idle.loss_weight, idle.routing.valid, idle.routing.ids):
        assert not mine.any()
    assert torch.equal(idle.input_ids, batch.input_ids[5:])


def test_a_batch_travels_unchanged():
    batch = batch_with([5, 3, 9])
    sent = batch_message({"do": "score", "rounds": [[0], [1, 2]]}, batch).encode()
    message = Message.decode(sent)
    assert message.header["rounds"] == [[0], [1, 2]]
    found = batch_from_message(message)
    for field in dataclasses.fields(batch):
        expected, value = getattr(batch, field.name), getattr(found, field.name)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(expected, value), field.name
            assert expected.dtype == value.dtype
    assert torch.equal(found.routing.ids, batch.routing.ids)
    assert (found.routing.layers, found.routing.num_experts) == ((1, 3), 300)
    changed = batch.replace(weight=batch.logp_rollout + 1, routing=None)
    part = Message.decode(batch_message({}, changed, batch).encode())
    assert part.tensors.keys() == {"weight"}
    again = batch_from_message(part, found)
    assert torch.equal(again.weight, changed.weight)
    assert again.input_ids is found.input_ids
    assert again.routing is None
    whole = torch.arange(6.0)  # views of one storage
    found = Message.decode(Message({}, {"a": whole[:3], "b": whole[1:]}).encode())
    assert torch.equal(found.tensors["b"], whole[1:])


def test_bytes_that_are_no_message_or_were_changed_are_refused():
    for data in (b"", b"\x80\x04", b"\xff" * 64, Message({}).encode()[:-1]):
        with pytest.raises(TrainingError, match="no message"):
            Message.decode(data)
    data = bytearray(batch_message({"do": "score"}, batch_with([5, 3])).encode())
    data[-9] ^= 1  # in the last tensor, where the message stays readable
    with pytest.raises(TrainingError, match="changed on the way"):
        Message.decode(bytes(data))


BASE = {"out": "x", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}


def test_torchrun_sets_the_number_of_ranks(monkeypatch):
    plain, set_to_three = resolve(BASE), resolve(BASE, ["train.ranks=3"])
    assert apply_torchrun_ranks(plain).train.ranks == 0
    assert apply_torchrun_ranks(set_to_three, 1, resumed=Path()).train.ranks == 1
    patient = resolve(BASE, ["train.ranks=3", "train.rank_timeout=9"])
    assert apply_torchrun_ranks(patient, 0, resumed=Path()).train.ranks == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert apply_torchrun_ranks(plain).train.ranks == 2
    assert apply_torchrun_ranks(set_to_three, resumed=Path()).train.ranks == 2
    with pytest.raises(UsageError, match="torchrun started 2 processes"):
        apply_torchrun_ranks(set_to_three)


def test_a_resume_on_other_ranks_places_as_many_processes(monkeypatch):
    placed = []

    @contextmanager
    def launcher(config, _):
        placed.append(config.train.ranks)
        yield

    def resume_run(*arguments):
        placed.append(arguments[-1].train.ranks)
        return {}

    monkeypatch.setattr(train_command, "_launcher", launcher)
    monkeypatch.setattr(train_command.resume, "resume_run", resume_run)
    monkeypatch.setattr(train_command, "summary_parts", lambda _: [])
    stored = resolve(BASE, ["train.ranks=2", "cluster.kind=ray"])
    train_command.run_to_end(stored, resumed=Path("run"), ranks=3)
    assert placed == [3, 3]


def test_under_torchrun_a_run_that_names_no_precision_has_the_gpus(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    plain, float32 = resolve(BASE), resolve(BASE, ["model.dtype=float32"])
    assert not apply_torchrun_ranks(plain).names_precision
    assert apply_torchrun_ranks(float32).names_precision
    assert apply_torchrun_ranks(plain) == resolve(BASE, ["train.ranks=2"])


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        (["train.ranks=8", "train.fsdp_param_dtype=bfloat16"], 0, "fsdp_param_dtype.*ranks = 8"),
        (["model.dtype=bfloat16"], 8, "model.dtype.*ranks = 0"),
    ],
)
def test_a_resume_on_ranks_that_its_settings_forbid_offers_a_fork(settings, ranks, words):
    """These are the precisions that a run on GPUs has by default."""
    fork = f"{words}, or fork.*--from runs/a out=... train.ranks={ranks} "
    with pytest.raises(UsageError, match=f"(?s){fork}"):
        apply_torchrun_ranks(resolve(BASE, settings), ranks, resumed=Path("runs/a"))


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that makes a rank of three, whose others are only keys in a store."""
    monkeypatch.setattr(ranks_module, "GRACE_S", 0.0)
    store, made = dist.HashStore(), []
    for number in range(3):
        store.set(process_key(number), f"process {number} on h")

    def make(rank, check_alive=lambda: None):
        gloo = {"get_rank": lambda: rank, "get_world_size": lambda: 3, "new_group": lambda **_: 0}
        gloo |= {"broadcast": lambda *_, **__: None, "DistError": dist.DistError}
        monkeypatch.setattr(ranks_module, "dist", SimpleNamespace(**gloo))
        made.append(Ranks(None, torch.device("cpu"), store, limit=60.0, check_alive=check_alive))
        return made[-1]

    yield make
    for each in made:
        each._ended.set()


CLOSED = RuntimeError("[/p/gloo/transport/tcp/pair.cc:553] Connection closed by peer\nmore")


def fails(ranks, error):
    with ranks.everywhere("step"):
        raise error


def test_ranks_that_a_failure_does_not_reach_are_named(ranks):
    first = ranks(0)
    first._store.set("failed/1/2", "")  # rank 2 has failed with it
    words = r"together: no answer from rank 1 \(process 1 on h\), which has ended or stands still "
    with pytest.raises(TrainingError, match=words) as raised:
        fails(first, CLOSED)
    assert str(raised.value).endswith("by peer; `--resume` continues after the last checkpoint")
    first._store.set("failed/2/1", "")
    first._store.set("failed/2/2", "")
    with pytest.raises(TrainingError, match=r"together: \[/p/gloo/.*peer; `--resume`"):
        fails(first, CLOSED)


def test_a_rank_that_fails_after_rank_0_has_left_a_call_is_named_by_the_next(ranks):
    first = ranks(0)
    with first.everywhere("step"):
        pass
    first._store.set("failed/1/2", "MemoryError: no room")
    with pytest.raises(TrainingError, match=r"rank 2 \(process 2 on h\): MemoryError: no room"):
        fails(first, CLOSED)
    other = ranks(0)
    with pytest.raises(TrainingError):
        fails(other, CLOSED)  # call 1: rank 0 has told of it, too
    with pytest.raises(TrainingError, match=r"no answer from rank 1 .*rank 2") as raised:
        fails(other, CLOSED)
    assert "MemoryError" not in str(raised.value)


def test_an_error_that_is_no_collectives_stays_what_it_is(ranks):
    for error in (UsageError("model.path: gone"), RuntimeError("out of memory")):
        with pytest.raises(type(error), match=str(error)):
            fails(ranks(0), error)


def test_a_launcher_that_knows_why_a_rank_has_ended_says_so(ranks):
    def check_alive():
        raise RankLost("rank 2 has ended: no memory")

    with pytest.raises(
        TrainingError, match=r"stands still \(.*\); rank 2 has ended: no memory; `-"
    ):
        fails(ranks(0, check_alive), CLOSED)


def test_another_rank_leaves_an_error_to_rank_0_that_has_it_too(ranks):
    second = ranks(1)
    with pytest.raises(OSError, match="full"), second.repeating():
        raise OSError("the disk is full")
    second._store.set("failed/0/0", "")
    with second.repeating():
        raise OSError("the disk is full")


def test_another_rank_knows_how_the_run_has_ended(ranks, monkeypatch):
    def gone(*_, **__):
        raise CLOSED

    second = ranks(1)

    def of_0(tensor, *_, **__):
        tensor.zero_()

    for broadcast in (of_0, gone):  # the second: rank 0 is killed
        monkeypatch.setattr(ranks_module.dist, "broadcast", broadcast)
        assert second.next_call() is None
        assert second.failed
    second._store.set(ranks_module.ENDED_KEY, "")
    assert second.next_call() is None
    assert not second.failed


@pytest.mark.parametrize("failed", [False, True])
def test_another_rank_leaves_warnings_to_rank_0_and_says_if_it_failed(failed, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "onepolicy")  # and back at the end
    store = dist.HashStore()
    settings = {"limit": 1.0, "device": "cpu", "release": __version__}
    store.set(launch_ranks.SETTINGS_KEY, json.dumps(settings))

    def next_call():
        logging.getLogger("onepolicy.train").warning("an update was skipped")

    ranks = SimpleNamespace(next_call=next_call, end=lambda: None, failed=failed)
    monkeypatch.setattr(RankInfo, "join", lambda *_: ranks)
    assert launch_ranks.run_rank(RankInfo(1, 2, 1), store) == failed
    assert caplog.text == ""


def test_a_rank_waits_for_a_rank_0_that_checks_a_large_checkpoint_first(monkeypatch, caplog):
    """Longer than for any other word from the store."""
    caplog.set_level(logging.INFO, "onepolicy")  # and back at the end
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch_ranks, "open_rendezvous", lambda *_: store)
    monkeypatch.setattr(launch_ranks, "_end_after_rank_0", lambda _: None)
    monkeypatch.setattr(launch_ranks.signal, "signal", lambda *_: None)
    ranks = SimpleNamespace(next_call=lambda: None, end=lambda: None, failed=False)
    monkeypatch.setattr(RankInfo, "join", lambda *_: ranks)
    settings = json.dumps({"limit": 1.0, "device": "cpu", "release": __version__})
    late = threading.Timer(0.3, lambda: store.set(launch_ranks.SETTINGS_KEY, settings))
    late.start()
    assert launch_ranks.run_launched_rank() == 0


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    launched = LaunchedRanks(RankInfo(0, 3, 0), store)
    store.set(process_key(1), "process 7 on h")
    with pytest.raises(RankLost, match=r"rank 2 did not come within 0.01 s \(train.rank_timeout\)"):
        _await_ranks(launched, 0.01)
    store.set(process_key(2), "process 8 on h")
    _await_ranks(launched, 0.01)


def test_ranks_need_somebody_who_starts_them(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="only `onepolicy train` and torchrun start ranks"):
        launched_ranks(resolve(BASE, ["train.ranks=2"]))


def test_a_rank_of_another_release_says_so():
    store = dist.HashStore()
    settings = {"limit": 1.0, "device": "cpu", "release": "0.0.0"}
    store.set(launch_ranks.SETTINGS_KEY, json.dumps(settings))
    words = r"rank 1 \(process \d+ on .*\): .* is installed here, but rank 0 runs 0.0.0; install"
    with pytest.raises(UsageError, match=words):
        launch_ranks.run_rank(RankInfo(1, 2, 1), store)


MODELING = """
from transformers import LlamaForCausalLM

class OwnForCausalLM(LlamaForCausalLM):
    pass
"""


def test_an_exported_model_has_the_code_of_its_own_class(tmp_path, monkeypatch):
    cache, source, out = (tmp_path / name for name in ("cache", "source", "out"))
    for folder in (cache, source, out):
        folder.mkdir()
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(cache)
    (source / "modeling_own.py").write_text(MODELING)
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    config.num_hidden_layers = 1
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config.save_pretrained(source)
    like = empty_model(ModelConfig(path=str(source), trust_remote_code=True))
    monkeypatch.setattr(export, "tensor_sizes", lambda folder: {})
    export.export_model(out, like)
    again = empty_model(ModelConfig(path=str(out), trust_remote_code=True))
    assert type(again).__name__ == "OwnForCausalLM"
