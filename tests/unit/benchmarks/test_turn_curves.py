"""benchmarks/turn_*.py: the task is the one on its page, and the tables compare runs of one seed
and one limit."""

import asyncio
import itertools
import json
import sys

import numpy as np
import pytest
import turn_curves
from turn_tables import VALUES, Outcome, probes, table, turn_table
from turn_task import HELD_OUT, LINKS, found, make_data, question, random_chain, search, worked

from onepolicy.config import SearchTool, load
from onepolicy.envs.tools import Search


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_data(folder)
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_problem_takes_as_many_searches_as_it_has_links(task):
    tool = Search(SearchTool(corpus=str(task / "corpus.jsonl"), passages=1))
    problems = lines(task / "problems.jsonl")
    for i, at in ((0, -HELD_OUT), (2, -HELD_OUT + 2), (LINKS - 1, 0)):
        problem = problems[at]
        entry, searches = problem["prompt"].removeprefix(question("")), 0
        while len(entry) == 3:
            reply = asyncio.run(tool.call(f"e{entry}"))
            assert reply.startswith(f"[1] e{entry} ")
            entry, searches = reply.split()[-1], searches + 1
        assert (entry, searches) == (problem["answer"], 1 + i % LINKS)


def test_lengths_are_uniform_and_entries_lead_to_one_place(task):
    passages = dict(line["text"].split() for line in lines(task / "corpus.jsonl"))
    problems = lines(task / "problems.jsonl")
    assert len(passages) == len(lines(task / "corpus.jsonl"))
    assert len({problem["prompt"] for problem in problems}) == len(problems)

    def links(entry):
        return 0 if entry.isdigit() else 1 + links(passages[f"e{entry}"])

    prompts = [problem["prompt"] for problem in problems[:-HELD_OUT]]
    training = [links(prompt.removeprefix(question(""))) for prompt in prompts]
    assert np.bincount(training).tolist() == [0] + [len(training) // LINKS] * LINKS


def test_worked_episodes_agree_with_the_environment(task):
    chain = random_chain(2, np.random.default_rng(0))
    first, second = chain.entries
    assert chain.episode(2, chain.answer) == (
        f"Start: {first}\n",
        f"Action: search[e{first}]",
        f"\nObservation: [1] e{first} {second}\n",
        f"Action: search[e{second}]",
        f"\nObservation: [1] e{second} {chain.answer}\n",
        f"Answer: {chain.answer}",
    )
    assert found("x") == "\nObservation: [1] x\n"
    assert search("abc") == "Action: search[eabc]"


def test_mistakes_are_guesses_at_their_rate():
    episodes = list(itertools.islice(worked(0.1), 400))
    searches = sum(len(texts) // 2 - 1 for texts in episodes)
    guesses = sum(texts[-1].split()[-1] not in texts[-2] for texts in episodes)
    assert 0.07 < guesses / (searches + guesses) < 0.13  # of the turns where a search belongs
    assert all(texts[-1].split()[-1] in texts[-2] for texts in itertools.islice(worked(0.0), 50))


def run(arm, turns, seed, score, rows=()):
    scores = {"eval/avg@2": score, "eval/greedy": 1.0}
    return Outcome(arm, turns, seed, [{"train/reward": 0.5, "mismatch/k3": 1e-5}, *rows], scores)


def cells_of(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_differences_are_paired_by_seed():
    """Seed 1 is 0.3 better in both arms. Only the gain of r3 on a seed counts: 0.1 and 0.2."""
    found = [run("off", 4, 0, 0.2), run("off", 4, 1, 0.5)]
    found += [run("r3", 4, 1, 0.7), run("r3", 4, 0, 0.3)]
    found += [run("off + tis", 4, 0, 0.2), run("off + tis", 4, 1, 0.5)]
    last = table(found, "avg@4", VALUES["held-out accuracy, sampled (avg@2)"]).splitlines()[-1]
    means = ["0.350 ± 0.212", "0.500 ± 0.283", "0.350 ± 0.212"]
    gains = ["+0.150 ± 0.071 (+0.100, +0.200)", "+0.000 ± 0.000 (+0.000, +0.000)"]
    assert cells_of(last) == ["4", *means, *gains, "2"]


def test_k3_by_turn_is_of_steps_scored_both_ways():
    plain = {"mismatch/k3_turn@0": 1.0, "train/tokens_turn@0": 10.0}
    both = {"mismatch/k3_turn@0": 2e-6, "counterfactual/mismatch/k3_turn@0": 8e-6}
    probe = plain | both
    found = [run("r3", 16, 0, 0.5, [probe, plain]), run("r3", 2, 0, 0.5, [plain | probe])]
    assert probes(found) == [probe]
    *_, row = turn_table(probes(found)).splitlines()
    ranges = [f"{k3} ({k3} to {k3})" for k3 in ("8.0e-06", "2.0e-06")]
    assert cells_of(row) == ["1", "10", *ranges, "4.00"]


def settings_of(monkeypatch, arm, seed, *arguments):
    """Return the checked settings of one run of the script."""
    monkeypatch.setattr(sys, "argv", ["turn_curves", *arguments])
    engine = turn_curves.engine_settings(turn_curves.arguments(), arm, seed)
    return load(turn_curves.RECIPE, [f"seed={seed}", *turn_curves.ARMS[arm], *engine])


def test_pressure_is_the_only_difference_of_engine_and_trainer(monkeypatch):
    """The same noise in both arms of a seed, another for another seed."""
    off = settings_of(monkeypatch, "off", 110, "--pressure", "1")
    r3 = settings_of(monkeypatch, "r3", 110, "--pressure", "1")
    assert off.rollout == r3.rollout
    assert off.rollout.engine.dtype == "float32"
    assert (off.rollout.pressure.scale, off.rollout.pressure.seed) == (1, 1110)
    assert (off.replay.mode, r3.replay.mode, r3.replay.min_agreement) == ("off", "r3", 0)
    assert settings_of(monkeypatch, "off", 111, "--pressure", "1").rollout.pressure.seed == 1111
    assert settings_of(monkeypatch, "off", 110).rollout.pressure is None


def test_a_run_whose_line_is_there_is_not_played_again(monkeypatch, tmp_path, capsys):
    results, played = tmp_path / "results.jsonl", []

    def play(folder, run, arm, turns, seed, engine):
        played.append((run.name, "rollout.pressure.scale=1.0" in engine))
        run.mkdir(parents=True)
        row = {"train/reward": 0.5, "mismatch/k3": 1e-2, "routing/routers": 0.4, "step": 0}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (run / "eval.json").write_text(json.dumps({"eval/avg@2": 0.25, "eval/greedy": 0.5}))

    monkeypatch.setattr(turn_curves, "play", play)
    command = ["turn_curves", "--pressure", "1", "--turns", "4", "1", "--arms", "off"]
    command += ["--seeds", "110", "--results", str(results)]
    for folder in ("a", "b"):
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / folder)])
        turn_curves.main()
    assert played == [(f"off-pressure1-turns{n}-seed110", True) for n in (4, 1)]
    kept = turn_curves.read_results(results)["off-pressure1-turns4-seed110"]
    assert (kept.arm, kept.turns, kept.seed, kept.k3) == ("off", 4, 110, 1e-2)
    assert kept.rows == [{"train/reward": 0.5, "mismatch/k3": 1e-2, "routing/routers": 0.4}]
    assert capsys.readouterr().out.count("| 4 | 1.0e-02 (1.0e-02 to 1.0e-02) |") == 2
