"""Messages of the command line on mistakes and on itself."""

import shlex
import tomllib
from itertools import product

from onepolicy.cli import EXIT_CODES, build_parser, main, parse_arguments
from onepolicy.cli.train import _forked_config
from onepolicy.config import RunConfig, ServiceUnavailable, load, read_recipe, resolve
from onepolicy.config.as_toml import as_toml
from onepolicy.config.load import resolve_as
from support.paths import ROOT

RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")


def refused(capsys, *words):
    """Return the message of a command that was refused."""
    try:
        status = main(list(words))
    except SystemExit as end:
        status = end.code
    assert status == 2
    return capsys.readouterr().err


def parsers(top):
    """Return every command's parser, those of groups too."""
    for each in top.subcommands().values():
        yield from parsers(each) if each.subcommands() else [each]


ON_POLICY = ["numerics=on-policy", "model.dtype=bfloat16"]
FORKS = [  # the parent's settings, the fork's, and its dtype and lm_head of model and engine
    (ON_POLICY, ["model.dtype=float32"], "float32 same float32 same"),
    (ON_POLICY, ["model.lm_head=float32"], "bfloat16 float32 bfloat16 float32"),
    ([*ON_POLICY, "model.lm_head=float32"], ["model.lm_head=same"], "bfloat16 same bfloat16 same"),
    (["numerics=on-policy"], ["numerics=fast"], "float32 same bfloat16 same"),
    (["replay.mode=off"], ["numerics=on-policy"], "float32 same float32 same"),
    (["rollout.engine.dtype=float32"], ["optim.lr=1e-5"], "float32 same float32 same"),
    (["rollout.engine.lm_head=float32"], ["seed=1"], "float32 same bfloat16 float32"),
]


def test_a_forks_engine_follows_its_model_where_the_parents_did(subtests):
    tree = {"out": "x", "steps": 3, "model": {"path": "m"}, "task": {"kind": "chain"}}
    for settings, changed, expected in FORKS:
        stored = RunConfig.model_validate_json(resolve(tree, settings).model_dump_json())
        with subtests.test(settings=settings, changed=changed):
            fork = _forked_config(stored, changed)
            model, engine = fork.model, fork.rollout.engine
            found = (model.dtype, model.lm_head, engine.dtype, engine.lm_head)
            assert " ".join(found) == expected
            assert fork.replay == stored.replay
    on_server = resolve(tree, ["rollout.engine.kind=vllm-server"])
    assert _forked_config(on_server, []) == on_server


def test_a_fork_that_changes_a_part_of_a_default_correction_keeps_the_rest():
    tree = {"out": "x", "steps": 3, "model": {"path": "m"}, "task": {"kind": "chain"}}
    parent = resolve(tree, ["replay.mode=off"])
    gates = 'correction.gates=[{statistic="ratio",aggregate="min",scope="sequence",low=1e-4}]'
    fork = _forked_config(parent, [gates])
    assert fork.correction.weight == parent.correction.weight
    assert fork.correction.weight.level == "token"
    assert len(fork.correction.gates) == 1
    assert _forked_config(parent, ["replay.mode=r3"]).correction.preset == "recompute"


TAKE_SETTINGS = ["train", "eval", "measure", "plan", "config", "engine check"]


WITH_DASHES = {  # what is typed -> the setting that it means
    "--lr 1e-4": "optim.lr=1e-4",
    "--lr=1e-4": "optim.lr=1e-4",
    "--optim.lr=1e-4": "optim.lr=1e-4",
    "--optim.lr 1e-4": "optim.lr=1e-4",
    "-lr 1e-4": "optim.lr=1e-4",
    "--learning-rate 1e-4": "optim.lr=1e-4",
    "--optim.weight-decay=0": "optim.weight_decay=0",
    "--seed -1": "seed=-1",
    "--correction tis": "correction.preset=tis",
    "--lr 1e-4 --group-size=4": "optim.lr=1e-4 rollout.group_size=4",
}


def test_a_setting_with_dashes_is_shown_with_dashes(capsys, subtests):
    for command, (typed, written) in product(TAKE_SETTINGS, WITH_DASHES.items()):
        with subtests.test(command, typed=typed):
            said = refused(capsys, *command.split(), QUICKSTART, *typed.split())
            assert said == f"onepolicy: settings have no dashes: write {written} for {typed}\n"


def test_settings_of_other_commands(capsys):
    assert "write out=runs/x for" in refused(capsys, "train", QUICKSTART, "--out", "runs/x")
    assert "write lr=1e-3 for" in refused(capsys, "make-policy", "--lr", "1e-3")
    assert "write max_num_seqs=4 for" in refused(
        capsys, *["engine", "serve", "x", "--max-num-seq", "4"]
    )


def test_an_option_that_is_no_setting_either(capsys):
    for command in TAKE_SETTINGS:
        said = refused(capsys, *command.split(), QUICKSTART, "-v")
        assert "has no option -v; options: --help" in said
        assert "settings have no dashes: a.b=value" in said
    # eval has no use for steps
    assert "did you mean --step?" in refused(capsys, "eval", "runs/x", "--steps", "3")
    assert "did you mean --out?" in refused(capsys, "measure", "--tiny", "--ouput", "x")
    assert "settings" not in refused(capsys, "audit", "dump.jsonl", "--lr", "3")
    assert "has no option --\\x1b[31m" in refused(capsys, "train", "--\x1b[31m")


def test_options_values_and_abbreviations_are_no_mistakes():
    options = ["--cluster", "8xH200", "--constant", "network=25e9", "optim.lr=1"]
    given = parse_arguments(["plan", QUICKSTART, *options])
    assert (given.cluster, given.constant) == ("8xH200", ["network=25e9"])
    assert given.overrides == ["optim.lr=1"]
    assert parse_arguments(["train", "--resum", "runs/x"]).resume == "runs/x"
    assert parse_arguments(["engine", "serve", "tiny", "--vllm=--x=1"]).vllm == ["--x=1"]


def test_an_unknown_command(capsys, subtests):
    for typed, meant in {
        "trian": "did you mean train?",
        f"Train {QUICKSTART}": "did you mean train?",
        "makepolicy": "did you mean make-policy?",
        "engine chekc tiny": "did you mean check?",
        "quickstart.toml": "did you mean onepolicy train quickstart.toml?",
        "report runs/x": "measure and audit with --out FOLDER",
        "presets": "write: onepolicy config preset",
        "frobnicate": "'frobnicate' is no command; there are train, compare, eval, make-policy, ",
    }.items():
        with subtests.test(typed):
            assert meant in refused(capsys, *typed.split())


def test_missing_and_surplus_words_are_explained(capsys, subtests):
    for typed, said in {
        "eval": "eval: give the recipe, e.g. onepolicy eval runs/quickstart eval.k=16",
        "engine serve": "engine serve: give the model, e.g. onepolicy engine serve ",
        "export --dtype bfloat16": "export: give the checkpoint and --out, e.g. onepolicy export ",
        "audit d.jsonl --columns mask=a tokens=b": "repeat it: --columns tokens=b",
        "audit d.jsonl e.jsonl f.jsonl": "unrecognized arguments: f.jsonl",
    }.items():
        with subtests.test(typed):
            assert said in refused(capsys, *typed.split())
    assert main(["audit", "--columns", "mask=a", "tokens=b"]) == 2
    assert "repeat it: --columns tokens=b" in capsys.readouterr().err
    assert main(["config", "presets"]) == 2
    assert "write: onepolicy config preset\n" in capsys.readouterr().err


NEARLY_RIGHT = [
    ("lr=1e-4", "lr: unknown setting (value 0.0001); did you mean optim.lr?"),
    ("optim.learning_rate=1", "did you mean optim.lr?"),
    ("rollout.lr=1", "did you mean optim.lr?"),
    ("group_size=4", "did you mean rollout.group_size?"),
    ("rollout.groupsize=4", "did you mean rollout.group_size?"),
    ("rollout.temperature=1", "did you mean rollout.sampling.temperature?"),
    ("mode=off", "did you mean replay.mode?"),
    ("engine=vllm", "did you mean rollout.engine?"),
    ("optm.lr=1", "did you mean optim?"),
    ("Steps=1", "did you mean steps?"),
    ("correction.preset=TIS", "did you mean tis?"),
    ("objective.preset=GSPO", "did you mean gspo?"),
    ("replay.mode=R3", "'R3' is none of 'off', 'r2', 'r3', 'soft', 'weights'; did you mean r3?"),
    ("task.kind=jsnl", "task.kind: 'jsnl' is none of"),
    ("task.kind=jsnl", "did you mean jsonl?"),
    ("rollout.engine.kind=vllm_server", "did you mean vllm-server?"),
    ("rollout.quant.format=INT8", "did you mean int8?"),
    ("cluster.kind=rya", "did you mean ray?"),
    ("model.dtype=bf16", "'bf16' is none of 'float32', 'bfloat16'; did you mean bfloat16?"),
    ("numerics=on_policy", "did you mean on-policy?"),
    ("optim.lr_decay=Linear", "did you mean linear?"),
]


def test_a_setting_that_was_nearly_right(capsys, subtests):
    for override, meant in NEARLY_RIGHT:
        with subtests.test(override):
            said = refused(capsys, "config", QUICKSTART, override)
            assert meant in said
            assert "Input" not in said


def test_nothing_is_suggested_that_is_not_near(capsys):
    for override in ("task.ops.x=1", "replay.ratio=1", "correction.cap=3", "epochs=3"):
        assert "did you mean" not in refused(capsys, "config", QUICKSTART, override)


def test_names_of_presets_and_engines(capsys):
    assert "did you mean tis?" in refused(capsys, "config", "preset", "TIS")
    assert "did you mean grpo?" in refused(capsys, "config", "objective", "GRP")
    assert "did you mean vllm?" in refused(capsys, "measure", "--tiny", "--engine", "vlm")


def test_a_printed_recipe_is_the_same_recipe(tmp_path, capsys, subtests):
    for recipe in RECIPES:
        with subtests.test(recipe.name):
            assert main(["config", str(recipe)]) == 0
            (tmp_path / "copy.toml").write_text(capsys.readouterr().out)
            assert load(tmp_path / "copy.toml") == load(recipe)


SETTINGS = [
    [
        "correction.preset=score-centering",
        "objective.surrogate=pg",
        "train.reuse_scoring_forward=false",
    ],
    ["correction.preset=seq-mis", "replay.mode=off"],
    ["objective.preset=ppo", "replay.mode=off", "rollout.max_staleness=2"],
    ["task.kind=jsonl", "task.path=a", "task.held_out_path=b", 'task.answer_prefix="\\"#\\n"'],
    [
        "task.kind=react",
        'task.problems={kind="gym", name="x", params={a=[1, {b=2}]}}',
        'task.tools=[{kind="search", corpus="c"}]',
    ],
    ["out=r\u00fcns/\u2192 #1"],
    ["train.ranks=2", "cluster.kind=ray", "rollout.quant.format=int8"],
    ["model.dtype=float32"],  # a precision of the user's own, on a GPU too
    ["train.autocast=off"],
]


def test_printed_settings_are_the_same_settings(subtests):
    for overrides in SETTINGS:
        with subtests.test(overrides[0]):
            config = load(QUICKSTART, overrides)
            printed = resolve(tomllib.loads(as_toml(config)))
            assert printed == config
            assert printed.names_precision == config.names_precision


def test_a_printed_setting_is_described():
    lines = as_toml(load(QUICKSTART)).splitlines()
    described = " ".join(lines[: lines.index('# dtype = "float32"')][-3:])
    assert "# Dtype of the trained parameters." in described
    assert "# quant is unset" in lines
    assert lines[lines.index("[replay]") + 1].startswith(("#", "mode"))


def test_an_example_of_the_help_can_be_typed(monkeypatch, subtests):
    monkeypatch.chdir(ROOT)
    for command in parsers(build_parser()):
        for line in command.examples:
            with subtests.test(line):
                words = shlex.split(line.partition(" > ")[0])
                assert f"{' '.join(words)} ".startswith(f"{command.prog} ")
                given = parse_arguments(words[1:])
                settings = [each for each in getattr(given, "overrides", []) if "=" in each]
                recipe = next((each for each in words if each.endswith(".toml")), QUICKSTART)
                if command.settings is RunConfig:
                    resolve_as(RunConfig, read_recipe(recipe), settings)
                elif command.settings is not None:
                    resolve_as(command.settings, {}, settings)


def test_every_command_has_examples_in_its_help():
    every = list(parsers(build_parser()))
    assert len(every) >= 9
    for each in every:
        assert 2 <= len(each.examples) <= 4
        assert f"examples:\n  {each.examples[0]}\n" in each.format_help()


def test_exit_codes_are_in_the_help_and_in_the_docs():
    assert EXIT_CODES in build_parser().format_help()
    docs = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    for code in (0, 1, 2, ServiceUnavailable.EXIT, 130):
        assert f"\n  {code} " in EXIT_CODES
        assert f"\n| {code} |" in docs
