"""What `onepolicy measure --numerics on-policy` prints of a comparison."""

from onepolicy.cli import main
from onepolicy.measure import measure
from onepolicy.measure.bitwise import Bitwise

FOUND = {"model": "it", "dtype": "float32", "sequences": 4, "tokens": 1000, "alone": 300}
FOUND |= {"differing": 7, "k3": 2e-9, "routers": 0.0125, "trainer_again": 0, "engine_alone": 3}
FOUND |= {"fingerprint": {}, "cannot_claim": None, "where": "token 5"}


def test_differences_are_a_table_and_the_path_is_one_word(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measure_model", lambda *_, **__: Bitwise(**FOUND))
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / ("x" * 120)
    how = ["--numerics", "on-policy", "rollout.engine.dtype=float32"]
    assert main(["measure", "--tiny", *how, "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    words = " ".join(printed.replace("\u2502", " ").split())
    for row in (
        "engine against trainer 7 1,000 of 4 sequences",
        "one sequence at a time 3 300",
        "routes, engine against trainer 1.25% all tokens",
        "k3 2e-9 nats per token",
    ):
        assert row in words
    assert f"written: {out / 'bitwise.json'} (bits" in printed
