"""Mistakes in the command `onepolicy gateway`, said before anything is loaded."""

import socket

import pytest

from onepolicy.cli import main


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    def run(*words, installed=True):
        monkeypatch.setattr(
            "onepolicy.config.input_files.find_spec", lambda name: installed or None
        )
        assert main(["gateway", "tiny", "--out", str(tmp_path / "out"), *words]) == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "0"], "--port: 0 is no port"),
        (["--turns", "0"], "--turns: 0 given, expected at least 1"),
        (["--tokens", "-2"], "--tokens: -2 given, expected at least 1"),
        (["--out", "."], "--out: . already exists"),
        (["--key-env", "GATEWAY_TEST_SECRET"], "GATEWAY_TEST_SECRET holds 5 characters"),
        (["--engine", "hf:http://x"], "hf runs in this process"),
        (["model.path=other"], "model.path: 'other' is set, but the command's model is 'tiny'"),
        (["--seconds", "9"], "--seconds: is of --conformance"),
        (["--template", "no.jinja"], "--template: no.jinja cannot be read"),
    ],
)
def test_mistakes(refused, monkeypatch, words, said):
    monkeypatch.setenv("GATEWAY_TEST_SECRET", "short")
    assert said in refused(*words)


def test_a_port_that_another_process_has_is_noticed_before_the_model_is_loaded(refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = f"--port: {port} of 127.0.0.1 cannot be used"
        assert said in refused("--port", str(port))


def test_packages_that_are_missing(refused):
    assert "needs starlette and uvicorn; pip install 'onepolicy[gateway]'" in refused(
        installed=False
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny"], "--out: is missing; give `onepolicy gateway MODEL --out FOLDER`"),
        (["--out", "traces"], "the model: is missing"),
        (["--conformance", "http://x", "--out", "traces"], "--out: --conformance checks a gateway"),
        (["--conformance", "http://x", "--port", "8300"], "--port: --conformance checks a gateway"),
        (["--conformance", "http://x", "--thoughts", "keep"], "--thoughts: --conformance checks"),
        (
            ["seed=1", "seed=2", "--turns", "3", "--conformance", "http://x"],
            "--turns, seed=1, seed=2: --conformance checks a gateway that runs and reads",
        ),
        (["--conformance", "http://x", "m", "a.b=1"], "a.b=1: --conformance checks a gateway"),
        (["--conformance", "http://x", "a.b=1"], "a.b=1: --conformance checks a gateway"),
        (["--conformance", "http://x", "--key-env", "GATEWAY_TEST_NONE"], "_NONE is not set"),
        (["--conformance", "http://x", "--seconds", "0"], "--seconds: 0 given, expected a time"),
        (["--conformance", "http://x", "--seconds", "nan"], "--seconds: nan given, expected a"),
    ],
)
def test_a_gateway_is_made_or_checked(capsys, words, said):
    assert main(["gateway", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], ("http://x", None, "policy", 600)),
        (["gpt", "--key-env", "GATEWAY_TEST_KEY"], ("http://x", "short", "gpt", 600)),
        (["--seconds", "9"], ("http://x", None, "policy", 9)),
    ],
)
def test_what_the_kit_is_told(monkeypatch, words, given):
    told = []
    monkeypatch.setenv("GATEWAY_TEST_KEY", "short")
    monkeypatch.setattr("onepolicy.cli.gateway.run_conformance", lambda *all: told.append(all) or 1)
    assert main(["gateway", "--conformance", "http://x", *words]) == 1
    assert told == [given]
