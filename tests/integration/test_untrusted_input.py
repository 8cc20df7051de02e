"""Files and addresses from others: none of their content is executed or leaves its folder, and no
secret is repeated."""

import asyncio
import json
import logging
import os
import pickle
import traceback

import numpy as np
import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import ModelConfig, UsageError, VLLMServerConfig, resolve
from onepolicy.config.serve import ServeConfig
from onepolicy.config.stored_config import check_trust, settings_to_repeat
from onepolicy.launch import arms
from onepolicy.launch.plan_arms import PlannedArm, runs_in
from onepolicy.models.load import load_model
from onepolicy.record.read import read_dump
from onepolicy.rollout.remote.client import EngineClient
from onepolicy.rollout.vllm import serve
from onepolicy.run import run_folder
from onepolicy.sync import weight_files
from onepolicy.sync.signed_store import Invitation
from onepolicy.sync.weight_files import INDEX, WeightFiles, read_weights
from onepolicy.train import checkpoint
from support.audit_dumps import gaussian_rows, write_jsonl
from support.fake_vllm import make_checkpoints
from support.http_server import Reply, Server

CPU = torch.device("cpu")


class Trap:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def model_folder(tmp_path):
    make_checkpoints(tmp_path)
    return tmp_path / "0"


def test_a_model_with_pickled_weights_is_refused(model_folder, tmp_path):
    (model_folder / "model.safetensors").unlink()
    for weights in (Trap(tmp_path / "sprung"), torch.zeros(32, 8)):  # one without a trap neither
        torch.save({"model.embed_tokens.weight": weights}, model_folder / "pytorch_model.bin")
        with pytest.raises(UsageError, match="safetensors"):
            load_model(ModelConfig(path=str(model_folder)), torch.float32, CPU)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
def test_a_dump_with_an_object_in_it_is_refused_unread(tmp_path, suffix):
    path, trap = tmp_path / f"dump{suffix}", Trap(tmp_path / "sprung")
    if suffix == ".pt":
        torch.save({"tokens": trap}, path)
    else:
        np.savez(path, tokens=np.array([trap], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match="dump"):
        list(read_dump(path, {}))
    assert not (tmp_path / "sprung").exists()
    with pytest.raises(FileNotFoundError):  # the trap works
        pickle.loads(pickle.dumps(Trap(tmp_path / "no" / "such")))


def test_an_index_names_files_of_its_folder_only(model_folder):
    for name in ("../1/model.safetensors", "/etc/hostname", "a/b.safetensors", 3):
        index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
        (model_folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(UsageError, match=r"is not a file of this folder"):
            load_model(ModelConfig(path=str(model_folder)), torch.float32, CPU)


def test_the_files_of_a_sync_are_those_of_its_folder(tmp_path):
    files = WeightFiles(str(tmp_path))
    folder = files.write_version([("a", torch.ones(2))], 1)
    assert dict(read_weights(str(folder)))["a"].tolist() == [1, 1]
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../../elsewhere.safetensors"}}))
    with pytest.raises(RuntimeError, match="is not a file of this folder"):
        list(read_weights(str(folder)))


def test_a_checkpoint_lists_files_of_its_folder_only(tmp_path):
    for name in ("../../etc/hostname", "/etc/hostname"):
        state = {"step": 1, "updates": 1, "files": {name: 1}}
        (tmp_path / checkpoint.STATE).write_text(json.dumps(state))
        with pytest.raises(UsageError, match="which is not in this folder"):
            checkpoint.verify(tmp_path)


def test_a_link_out_of_a_dump_is_refused(tmp_path):
    dump = tmp_path / "dump"
    dump.mkdir()
    (tmp_path / "private.jsonl").write_text('{"secret": 1}\n')
    (dump / "rows.jsonl").symlink_to(tmp_path / "private.jsonl")
    with pytest.raises(UsageError, match="a link out of the dump's folder"):
        list(read_dump(dump, {}))


def test_engine_files_are_not_written_where_others_may_change_them(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files.tempfile, "gettempdir", lambda: str(tmp_path))
    base = tmp_path / f"onepolicy-sync-{os.getuid()}"
    assert WeightFiles(None).folder.parent == base
    assert base.stat().st_mode & 0o777 == 0o700
    base.chmod(0o777)
    with pytest.raises(UsageError, match=r"sync_dir: .* others may write to it"):
        WeightFiles(None)
    for entry in base.iterdir():
        entry.rmdir()
    base.rmdir()
    (tmp_path / "theirs").mkdir()
    base.symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match=r"sync_dir: .* belongs to somebody else"):
        WeightFiles(None)


def test_guard_settings_of_a_server_cannot_be_passed_through(monkeypatch, subtests):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    settings = {"max_len": 96, "vocab": 32, "return_routes": False, "cpu": True}
    guarded = "--host=0.0.0.0 --host --hos=:: --middleware=x.Y --trust-remote-code --trust_remote"
    guarded += " --aux-output-config={} --aux"
    for argument in guarded.split():
        extra = ["--tensor-parallel-size=2", argument]
        with (
            subtests.test(argument),
            pytest.raises(UsageError, match="is set by onepolicy engine serve"),
        ):
            serve.run_server(ServeConfig(), "model", **settings, extra=extra)


SECRET = "hunter2-not-to-be-seen"


@pytest.mark.parametrize("kind", ["vllm-server", "sglang"])
def test_an_address_with_a_secret_is_refused_without_repeating_it(kind):
    for url in (f"http://me:{SECRET}@127.0.0.1:1", f"http://127.0.0.1:1/?key={SECRET}"):
        engine = {"kind": kind, "url": url}
        tree = {"out": "x", "model": {"path": "tiny"}, "rollout": {"engine": engine}}
        with pytest.raises(UsageError, match="has a user, a password or a query in it") as caught:
            resolve(tree)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_token_is_in_no_message_setting_or_log(monkeypatch, caplog):
    monkeypatch.setenv("ENGINE_TOKEN", SECRET)
    caplog.set_level(logging.DEBUG)
    assert SECRET not in VLLMServerConfig(token_env="ENGINE_TOKEN").model_dump_json()
    told = []

    def refuse(request):
        told.append(request.headers["authorization"])
        return Reply({"error": "no"}, 403)

    with Server({"GET /a": refuse}) as server:
        client = EngineClient(server.url, token_env="ENGINE_TOKEN", retries=0, server="the server")
        for path in ("/a", "/b"):
            with pytest.raises(RuntimeError) as caught:
                asyncio.run(client.get(path))
            assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert told == [f"Bearer {SECRET}"]
    assert SECRET not in caplog.text + repr(client)
    assert SECRET not in repr(Invitation("127.0.0.1", 1, SECRET, 2, "gloo", 1.0))
    settings = {"model": "m", "dtype": "float32"}
    assert SECRET not in " ".join(serve.command_line(settings, "127.0.0.1", 8000))


def test_a_server_gets_no_cookie_back():
    """They would be kept without end, and sent with every request."""
    sent = []

    def answer(request):
        sent.append(request.headers.get("cookie"))
        return Reply({}, headers={"Set-Cookie": f"c{len(sent)}={'x' * 3000}; Max-Age=9999"})

    with Server({"GET /a": answer}) as server:

        async def ask():
            client = EngineClient(server.url, retries=0, server="the server")
            for _ in range(2):
                await client.get("/a")

        asyncio.run(ask())
    assert sent == [None, None]


TRUST, URL, ADDRESS = "model.trust_remote_code", "rollout.engine.url", "cluster.address"
CHAIN = {"kind": "chain"}
GYMNASIUM = {"kind": "gymnasium", "returns": [0, 1], "id": "FrozenLake-v1"}
WRAPPED = {"id": "GymV26Environment-v0", "params": {"env_id": "evil:Env-v0"}}
VERIFIERS = {"kind": "verifiers", "env": {"taskset": {"id": "evil", "api_key": SECRET}}}
SERVER = ["rollout.engine.kind=vllm-server", "rollout.engine.token_env=HOME"]
ELSEWHERE = [
    (URL, '"https://evil.example:8000"', SERVER, CHAIN),
    (URL, '["http://127.0.0.1:8000", "http://10.0.0.1:8000"]', SERVER, CHAIN),
    (URL, '"file:servers.txt"', SERVER, CHAIN),
    (URL, '"dns:http://localhost:8000"', SERVER, CHAIN),
    (ADDRESS, '"10.0.0.1:6379"', ["cluster.kind=ray"], CHAIN),
]
ASKED = [
    *ELSEWHERE,
    (TRUST, "true", [], CHAIN),
    ("task.id", '"evil.module:Env-v0"', [], GYMNASIUM | {"id": "evil.module:Env-v0"}),
    ("task.id", '"GymV26Environment-v0"', [], GYMNASIUM | WRAPPED),
    ("task.kind", "verifiers", [], VERIFIERS),
]
"""What is asked about, its value, what else the run has set, its task."""


def stored(folder, setting=None, value=None, others=(), task=CHAIN):
    """Make a run folder with these settings. It has no checkpoint."""
    given = [*others, f"{setting}={value}"] if setting else others
    config = resolve({"task": task, "steps": 1, "out": "run"}, ["model.path=tiny", *given])
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json())
    return config


@pytest.mark.parametrize(("setting", "value", "others", "task"), ASKED)
def test_a_strangers_run_connects_and_executes_nothing_unless_typed(
    setting, value, others, task, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("connects"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # without a token Ray is not asked
    run, out, typed = tmp_path / "run", f"out={tmp_path / 'new'}", f"{setting}={value}"
    stored(run, setting, value, others, task)
    for words in (["eval", run], ["train", "--resume", run], ["train", "--from", run, out]):
        words = [str(word) for word in words]
        if (setting, words[0]) != (ADDRESS, "eval"):  # which asks no Ray
            assert main(words) == 2
            told = capsys.readouterr().err
            where = f"{run}: its config.json has {setting} = {value}, so `onepolicy {words[0]}"
            assert where in told
            assert f"add {typed} to the command" in told
            assert SECRET not in told
        assert main([*words, typed]) == 2
        assert f"checkpoint of {run}" in capsys.readouterr().err  # it goes on to load one


def test_servers_of_this_machine_and_what_is_typed_are_not_asked_about(tmp_path):
    for number, address in enumerate(("http://127.0.0.1:8000", "http://[::1]:8000")):
        run = tmp_path / str(number)
        check_trust(stored(run, URL, f'"{address}"', SERVER), run, (), "eval")
    for number, address in enumerate(("127.0.0.1:6379", "auto", "[::1]:6379")):
        run = tmp_path / f"ray{number}"
        check_trust(stored(run, ADDRESS, f'"{address}"', ["cluster.kind=ray"]), run, (), "train")
    config = stored(tmp_path / "run", *ELSEWHERE[0])
    for typed in (f"{URL}=https://mine.example", 'rollout.engine={kind="hf"}'):
        check_trust(config, tmp_path / "run", [typed], "eval")
    with pytest.raises(UsageError, match="https://evil"):
        check_trust(config, tmp_path / "run", ["rollout.engine.token_env=MINE"], "eval")


def test_a_run_of_ones_own_repeats_what_its_start_said(tmp_path):
    config = stored(run := tmp_path / "run-seed0", TRUST, "true")
    (arm,) = runs_in(run.parent, [PlannedArm("run", (), config.model_copy(update={"out": "run"}))])
    assert arm.command(run)[-2:] == [f"--resume={run}", f"{TRUST}=true"]
    for number, (setting, value, *rest) in enumerate(ELSEWHERE):
        config = stored(tmp_path / str(number), setting, value, *rest)
        (repeated,) = settings_to_repeat(config)
        assert repeated == f"{setting}={value}"
        assert resolve(config.model_dump(), [repeated]) == config


def test_a_task_of_an_installed_package_is_not_asked_about(tmp_path, capsys):
    plain = GYMNASIUM | {"params": {"map_name": "8x8", "is_slippery": False}}
    for number, task in enumerate((plain, {"kind": "textarena", "game": "Wordle-v0"})):
        run = tmp_path / str(number)
        check_trust(stored(run, task=task), run, (), "eval")
    assert main(["train", "--resume", str(tmp_path / "0"), "task.id=Other-v1"]) == 2
    assert "task.id: a resumed run keeps its task" in capsys.readouterr().err


def test_a_link_out_of_a_checkpoint_is_not_copied(tmp_path):
    """`onepolicy export` would put what it leads to among the files to publish."""
    saved = tmp_path / "step_00001"
    saved.mkdir()
    state = {"step": 1, "updates": 1, "files": {}}
    (saved / checkpoint.STATE).write_text(json.dumps(state))
    checkpoint.verify(saved)
    (tmp_path / "secret").write_text("key")
    (saved / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(
        UsageError, match=r"chat_template\.jinja: a link out of this folder.* cp -rL"
    ):
        checkpoint.verify(saved)


def test_what_the_hubs_cache_links_to_is_read(tmp_path):
    """The files of a snapshot are links to blobs; a stranger's link to anything else is refused."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    saved = snapshot / "run" / "checkpoints" / "step_00001"
    saved.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "a").write_text("weights")
    write_jsonl(blobs / "b", gaussian_rows(1e-3, rows=2, length=4))
    state = {"step": 1, "updates": 1, "files": {"weights": 7}}
    (saved / checkpoint.STATE).write_text(json.dumps(state))
    (saved / "weights").symlink_to(os.path.relpath(blobs / "a", saved))
    (snapshot / "rows.jsonl").symlink_to("../../blobs/b")
    assert checkpoint.verify(saved)["step"] == 1
    assert sum(len(block.lengths) for block in read_dump(snapshot, {})) == 2
    (tmp_path / "secret").mkdir()
    for target in ("secret", "snapshots/other", "."):
        (saved / "more").symlink_to(os.path.relpath(tmp_path / target, saved))
        with pytest.raises(UsageError, match="a link out of this folder"):
            checkpoint.verify(saved)
        (saved / "more").unlink()
    blobs.rename(tmp_path / "moved")
    blobs.symlink_to("moved")  # a stranger's `blobs` is no way out
    with pytest.raises(UsageError, match="a link out of this folder"):
        checkpoint.verify(saved)


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "metrics.jsonl",
        ".samples.jsonl.writing",
        "checkpoints",
        "probes",
        "a/b",
        "tensorboard/b",
    ],
)
def test_a_resume_follows_no_link_out_of_a_strangers_run(name, tmp_path, capsys):
    """It would write, cut off or delete what the link leads to."""
    run = tmp_path / "run"
    stored(run)
    (run / "checkpoints").rmdir()
    (run / "wandb").mkdir()
    (run / "wandb" / "debug-core.log").symlink_to(tmp_path)  # as its client does
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    if "." not in name:
        elsewhere.unlink()
        (elsewhere / "step_00001").mkdir(parents=True)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(os.path.relpath(elsewhere, (run / name).parent))
    assert main(["train", "--resume", str(run)]) == 2
    told = capsys.readouterr().err
    assert f"{run / name}: a link out of the run's folder" in told
    assert elsewhere.is_dir() or elsewhere.read_text() == "precious"


def test_a_lock_is_no_link(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".lock").symlink_to("victim")
    with pytest.raises(UsageError, match="symbolic link"), run_folder.lock_run(tmp_path):
        pass
    with pytest.raises(UsageError, match="symbolic link"), arms.lock_arms(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "precious"
