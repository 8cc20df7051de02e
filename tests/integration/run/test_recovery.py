"""A server lost in the middle of a run: earlier samples do not count, and the restarted server gets
the weights again."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import TrainingError, UsageError, resolve
from onepolicy.rollout.collect import gather_or_cancel
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.run import async_rollouts, recovery, resume, run_folder
from onepolicy.run.async_rollouts import RolloutPrefetcher
from onepolicy.run.recovery import wait_for_server
from onepolicy.run.step import Rollouts, StepRunner
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Sampling
from support.fake_vllm import GENERATE, connected, embedding
from support.http_server import Reply, Server
from support.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("no_waiting")
PATHS = ("/version", "/weight_info", "/pause", "/collective_rpc", "/reset_prefix_cache", GENERATE)


def run_of(url, path="m", **engine):
    engine = {"kind": "vllm-server", "url": url, "timeout_s": LIMIT_S} | engine
    tree = {"out": "x", "steps": 9, "task": {"kind": "chain"}, "optim": {"lr": 1e-3}}
    return resolve(tree | {"model": {"path": path}, "rollout": {"engine": engine}})


@pytest.fixture
def parts(fake, checkpoints, monkeypatch):
    """Build a run at step 3, with other weights than the server's initial ones."""
    monkeypatch.setattr(recovery, "POLL_S", 0.01)
    config = run_of(fake.server.url, path=fake.model, dtype="float32", recovery_timeout_s=LIMIT_S)
    learner = LocalLearner(PolicyScorer(checkpoints[1][1], config, routers=None))
    learner.version = 3
    engine = connected(fake, retries=1)
    parts = SimpleNamespace(
        engine=engine, learner=learner, config=config, samplers=[engine], reprefill=None
    )
    asyncio.run(engine.attach(fake.model))
    asyncio.run(engine.load_weights(learner.named_weights(), 3))
    return parts


def change_rollout(parts, engine=None, **changes):
    """Change settings of the run's rollout, and of its engine."""
    rollout = parts.config.rollout
    changes["engine"] = rollout.engine.model_copy(update=engine or {})
    rollout = rollout.model_copy(update=changes)
    parts.config = parts.config.model_copy(update={"rollout": rollout})


async def batch(engine):
    return [await engine.generate([3, i], Sampling(1.0, 5), seed=i) for i in range(4)]


def same(found, expected):
    assert all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a.logp, b.logp) for a, b in zip(found, expected, strict=True))
    assert {int(v) for a in found for v in a.version} == {3}


def restart(fake):
    """Restart the server as another process on its port, with its initial weights."""
    fake.weights, fake.table, fake.probe = "default", embedding(fake.model), None


def down(fake, requests):
    """Let the server hang up on so many requests and be another process afterwards."""
    left = [requests]

    def reply(reply, number):
        left[0] -= 1
        if left[0] == 0:
            fake.spoil.clear()
            restart(fake)
        return Reply(hang_up=True)

    fake.spoil = dict.fromkeys(PATHS, reply)


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of onepolicy.run.recovery by [seconds], which advances by one at every
    reading."""
    now = [0.0]

    def look():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=look))
    return now


def test_a_restarted_server_samples_the_same_batch(parts, fake):
    expected = asyncio.run(batch(parts.engine))
    fake.spoil[GENERATE] = lambda reply, number: down(fake, 20) or Reply(hang_up=True)
    same(asyncio.run(StepRunner(parts, []).with_recovery(lambda: batch(parts.engine))), expected)
    assert fake.weights.endswith("-3")
    assert fake.probe is not None  # the next run can check its reload


def test_an_unnoticed_restart_is_found_before_the_batch_counts(parts, fake):
    """A restart between two requests gives no error, and half of the batch comes from the server's
    initial weights."""
    expected, times = asyncio.run(batch(parts.engine)), []

    async def unseen():
        found = (await batch(parts.engine))[:2]
        if not times:
            restart(fake)
        times.append(1)
        return found + (await batch(parts.engine))[2:]

    same(asyncio.run(StepRunner(parts, []).with_recovery(unseen)), expected)
    assert len(times) == 2


def test_a_server_restarted_during_an_update_gets_the_new_weights(parts, fake):
    restart(fake)
    parts.learner.version = 4
    push = lambda: parts.engine.load_weights(parts.learner.named_weights(), 4)  # noqa: E731
    asyncio.run(StepRunner(parts, []).with_recovery(push))
    assert fake.weights.endswith("-4")
    assert parts.engine.version == 4


def test_episodes_of_later_steps_are_started_again(parts, fake, monkeypatch):
    """The server is lost while two steps are in play. No request of either continues, and both
    count once, with the right weights."""
    began, ended = [], []

    async def play(parts, step, advance):
        began.append(step)
        try:
            return Rollouts(await batch(parts.engine), {})
        finally:
            ended.append(step)

    monkeypatch.setattr(async_rollouts, "sample_rollouts", play)
    monkeypatch.setattr(
        async_rollouts, "token_versions", lambda done: torch.cat([each.version for each in done])
    )
    change_rollout(parts, max_staleness=1)

    async def main():
        expected = await batch(parts.engine)
        fake.spoil[GENERATE] = lambda reply, number: down(fake, 20) or Reply(hang_up=True)
        async with RolloutPrefetcher(StepRunner(parts, []), 3) as prefetcher:

            async def episodes():
                prefetcher.schedule(3)
                return await prefetcher.get(3)

            async def forget():
                await prefetcher.cancel_all(3)
                assert (began, sorted(ended), prefetcher.idle) == ([3, 4], [3, 4], True)

            same((await StepRunner(parts, []).with_recovery(episodes, forget)).groups, expected)
            assert began == [3, 4, 3, 4]
            same((await prefetcher.get(4)).groups, expected)

    asyncio.run(main())


def test_a_server_that_stays_away_ends_the_run_in_time(parts, fake, clock):
    """The run asks it again and again until the patience is over, with two readings of the clock
    each time."""
    fake.spoil = dict.fromkeys(PATHS, lambda reply, number: Reply(hang_up=True))
    change_rollout(parts, {"recovery_timeout_s": 30.0})
    asked = len(fake.server.asked)
    with pytest.raises(EngineLost, match=r"/generate, 2 times; got RemoteProtocolError.*--resume"):
        asyncio.run(StepRunner(parts, []).with_recovery(lambda: batch(parts.engine)))
    assert 30 <= clock[0] < 40
    assert len(fake.server.asked) - asked > 20


def test_a_server_that_does_not_come_back_says_why(parts, fake, monkeypatch):
    """Its push of weights fails after a good start."""
    change_rollout(parts, {"recovery_timeout_s": 0.001})
    push_failed = EngineLost("the push ended in an illegal memory access. See its log")

    async def nothing(*args, **kwargs):
        pass

    async def fails(*args, **kwargs):
        raise push_failed

    monkeypatch.setattr(parts.engine, "come_back", nothing)
    monkeypatch.setattr(recovery, "push_weights", fails)

    async def work():
        raise EngineLost("gone")

    with pytest.raises(EngineLost, match=r"^gone\. It was not back .*illegal memory ac") as caught:
        asyncio.run(StepRunner(parts, []).with_recovery(work))
    assert caught.value.__cause__ is push_failed


def test_without_patience_an_unnoticed_restart_ends_the_run(parts, fake):
    """An evaluation beside episodes in play makes no other request that would notice."""
    change_rollout(parts, {"recovery_timeout_s": 0.0})
    assert len(asyncio.run(StepRunner(parts, []).with_recovery(lambda: batch(parts.engine)))) == 4
    restart(fake)
    with pytest.raises(EngineLost, match="holds weights 'default'"):
        asyncio.run(StepRunner(parts, []).with_recovery(lambda: batch(parts.engine)))


def test_a_server_lost_again_and_again_ends_the_run(parts):
    tries = []

    async def work():
        tries.append(1)
        raise EngineLost("gone")

    with pytest.raises(EngineLost, match="gone"):
        asyncio.run(StepRunner(parts, []).with_recovery(work))
    assert len(tries) == 4


def test_one_that_comes_back_as_another_is_refused(parts, fake):
    restart(fake)
    fake.told = {"dtype": "bfloat16"}
    words = r"is back, but this run cannot use it: .*runs bfloat16"
    with pytest.raises(TrainingError, match=words):
        asyncio.run(StepRunner(parts, []).with_recovery(lambda: batch(parts.engine)))


def test_no_request_of_a_failed_batch_continues():
    """It would sample on while the engine is given its weights."""
    ended = []

    async def slow():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(1)

    async def fails():
        raise EngineLost("gone")

    with pytest.raises(EngineLost):
        asyncio.run(gather_or_cancel([slow(), fails(), slow()]))
    assert len(ended) == 2


def test_a_resume_waits_for_a_lost_server(tmp_path, monkeypatch):
    """The whole machine was lost and both are started again. The driver is up long before the
    server answers."""
    monkeypatch.setattr(recovery, "POLL_S", 0.01)
    asked, notes = [], []

    def health(request):
        asked.append(1)
        return [Reply(hang_up=True), Reply({}, 503), Reply({})][min(len(asked) - 1, 4) // 2]

    def built(*arguments):
        raise TrainingError(f"built after {len(asked)}")

    monkeypatch.setattr(resume, "build_components", built)
    with Server({"GET /weight_info": health}) as server:
        config = run_of(server.url)
        run_folder.create_run_folder(tmp_path / "run", config, run_folder.FROM_SCRATCH, "{}")
        progress = SimpleNamespace(note=notes.append)
        with pytest.raises(TrainingError, match="built after 5"):
            resume.resume_run(tmp_path / "run", progress)
    assert len(notes) == 1
    assert notes[0].endswith("Waiting up to 300 s for it")


def test_a_refused_run_removes_the_folder_that_it_made_and_no_other(tmp_path):
    config = run_of("http://127.0.0.1:1")
    there, link = tmp_path / "there", tmp_path / "link"
    there.mkdir()
    link.symlink_to(there)
    made = run_folder.create_run_folder(link, config, run_folder.FROM_SCRATCH, "{}")
    assert (made, (there / "run.json").exists()) == (there, True)
    link.unlink()  # the name of the run leads elsewhere meanwhile
    link.symlink_to(tmp_path)
    refused = run_folder.removed_if_refused(made, existed=True)
    with pytest.raises(UsageError, match="refused"), refused:
        raise UsageError("refused")
    assert sorted(tmp_path.iterdir()) == [link, there]
    assert not any(there.iterdir())


def test_a_resume_may_say_where_the_server_is_now(tmp_path, monkeypatch, capsys):
    config = run_of("http://127.0.0.1:1")
    run_folder.create_run_folder(tmp_path / "run", config, run_folder.FROM_SCRATCH, "{}")
    moved = []
    monkeypatch.setattr(
        resume, "resume_run", lambda *arguments: moved.append(arguments[-1]) or {"steps": 9}
    )
    settings = ["rollout.engine.url=https://elsewhere:8000", "rollout.engine.token_env=TOKEN"]
    assert main(["train", "--resume", str(tmp_path / "run"), *settings]) == 0
    expected = run_of("https://elsewhere:8000", token_env="TOKEN")
    assert moved == [expected]
    assert main(["train", "--resume", str(tmp_path / "run"), "rollout.engine.max_num_seqs=3"]) == 2
    refused = capsys.readouterr().err
    assert "rollout.engine.url, rollout.engine.token_env, train.rank_timeout and" in refused
    assert "cluster.* may change, not 'rollout.engine.max_num_seqs=3'" in refused


def test_a_resume_whose_server_stays_away_reports_it(monkeypatch, clock):
    monkeypatch.setattr(recovery, "POLL_S", 0.01)
    with Server({"GET /weight_info": lambda request: Reply(hang_up=True)}) as server:
        config = run_of(server.url, recovery_timeout_s=10, retries=0)
        asyncio.run(wait_for_server(config, lambda text: None))
        assert len(server.asked) == 10


def test_a_resume_asks_all_servers_at_once():
    """The first answers nothing until the second was asked."""
    asked, seen = threading.Event(), []

    def hangs(request):
        seen.append(asked.wait(LIMIT_S))
        return {}

    def answers(request):
        asked.set()
        return {}

    with (
        Server({"GET /weight_info": hangs}) as first,
        Server({"GET /weight_info": answers}) as second,
    ):
        config = run_of((first.url, second.url))
        asyncio.run(wait_for_server(config, pytest.fail))
    assert seen == [True]


def test_a_server_that_refuses_the_question_is_there():
    with Server({}) as server:  # 404
        asyncio.run(wait_for_server(run_of(server.url), pytest.fail))
        assert len(server.asked) == 1
