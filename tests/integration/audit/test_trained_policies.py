"""Sound runs of trained policies are not accused, and a fault of all rows is looked into before it
is corrected. docs/audit.md has the tables of many worlds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from onepolicy.audit.run import audit
from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.verdict.declared import CEILINGS, Declared
from support.audit_dumps import gaussian_rows, write_jsonl
from support.paths import ROOT
from support.trained_worlds import CLEAN, PLANTED, judged, settings, sound

POLICY = ROOT / "benchmarks" / "evidence" / "policies" / "one-of-8"


GENUINE = {"nf4": 1, "flips 10%": 11, "growth 40": 1, "nf4 trainer": 11, "1 update old": 1}
"""Kind -> world: 1 has an entropy of 0.02 in short rows, 11 one of 0.3 in longer ones."""


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", GENUINE)
def test_genuine_mismatch_is_not_accused(kind) -> None:
    number = GENUINE[kind]
    found = judged(sound(kind, number, *settings(number)), kind)
    assert found.action in ("nothing", "correct"), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLEAN)
def test_no_world_of_35_is_accused(kind) -> None:
    found = {n: judged(sound(kind, n, *settings(n)), kind) for n in range(35)}
    assert not {n: each for n, each in found.items() if each.action == "bug"}


@pytest.fixture(scope="module")
def sound_world():
    return sound("bf16", 12, *settings(12))  # entropy 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["T 0.9, processed", "base 10, rollout", "top-p 0.8", "adapter lost, all rows"]
)
def test_a_fault_of_a_trained_policy_is_not_corrected(sound_world, name) -> None:
    fault, w = PLANTED[name], sound_world.copy()
    fault.plant(w)
    found = judged(w, "bf16")
    assert found.action == ("bug" if fault.causes else "unclear")
    assert not fault.causes or set(fault.causes) & set(found.causes)


def test_a_nearly_certain_policy_whose_experts_differ_now_and_then(tmp_path) -> None:
    """Of 200 tokens 199 are certain; in every tenth context the engine's logits are 2 nats off."""
    for seed in range(2):
        torch.manual_seed(seed)
        z = torch.randn(192, 40, 32)
        z[..., 0] += torch.where(torch.rand(192, 40) < 0.995, 12.0, 3.0)
        other = z + (0.02 + 2 * (torch.rand(192, 40, 1) < 0.1)) * torch.randn(z.shape)
        ids = torch.distributions.Categorical(logits=other).sample()
        said = verdict_on(tmp_path, ids, 0, logp(z, ids), logp(other, ids), entropy(z))
        assert (said.action, said.causes) == ("correct", ()), said.text()


def forks(seed, rows=96, length=80, *, noise=0.03, certain=0.4, ends=0):
    """Return ids, both sides' log-probabilities and the entropy of a policy of certain tokens and
    forks of two. Certain ones, the last `ends` among them, are exactly 0 on both sides."""
    g = torch.Generator().manual_seed(seed)
    m = 2 * torch.randn(rows, length, generator=g) + 2
    other = m + noise * torch.randn(m.shape, generator=g)
    sign = torch.where(torch.rand(m.shape, generator=g) < other.sigmoid(), 1.0, -1.0)
    sure = torch.rand(m.shape, generator=g) < certain
    sure |= torch.arange(length) >= length - ends
    h = torch.distributions.Bernoulli(logits=m).entropy()
    ids = torch.randint(5000, m.shape, generator=g)
    sides = ((sign * each).sigmoid().log().masked_fill(sure, 0.0) for each in (m, other))
    return ids, *sides, h.masked_fill(sure, 0.0)


def test_answers_that_end_in_certain_words_are_no_padding(tmp_path) -> None:
    ids, trainer, rollout, h = forks(0, ends=6)
    said = verdict_on(tmp_path, ids, 0, trainer, rollout, h)
    assert said.action == "nothing", said.text()
    ids[:, -6:] = 7  # one token throughout, inside the mask: padding
    said = verdict_on(tmp_path, ids, 0, trainer, rollout, h)
    assert said.causes == ("fill",), said.text()


def test_a_coarse_grid_is_no_fill_value(tmp_path) -> None:
    """Forks of two have few numbers in bfloat16; beside them most tokens are nearly certain."""
    for seed in (5, 9, 10):
        g = torch.Generator().manual_seed(seed)
        z = 0.5 * torch.randn(24, 80, 30, generator=g)
        z[..., 0] += 8 + 2 * torch.rand(24, 80, generator=g)
        fork = z[..., 0] + 0.5 * torch.randn(24, 80, generator=g)
        z[..., 1] = torch.where(torch.rand(24, 80, generator=g) < 0.8, z[..., 1], fork)
        other = z + 0.25 * torch.randn(z.shape, generator=g)
        ids = torch.multinomial(other.softmax(-1).flatten(0, 1), 1, generator=g).view(24, 80)
        sides = (logp(each, ids).bfloat16().float() for each in (z, other))
        said = verdict_on(tmp_path, ids, 0, *sides, entropy(z))
        assert said.action == "correct", said.text()


@pytest.mark.parametrize(
    ("temperature", "noise", "causes"), [(0.7, 0.02, ("temperature",)), (1.0, 0.25, ())]
)
def test_tokens_that_fix_their_context_have_no_lengths(temperature, noise, causes, tmp_path):
    """In a Markov chain each token has a factor of its own, whatever makes the sides differ."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(60, 60, generator=g)
    z[torch.arange(60), torch.randint(60, (60,), generator=g)] += 7 * torch.rand(60, generator=g)
    other = (z + noise * torch.randn(z.shape, generator=g)) / temperature
    ids = torch.randint(60, (96, 1), generator=g)
    while ids.shape[1] < 60:
        drawn = torch.multinomial(other[ids[:, -1]].softmax(-1), 1, generator=g)
        ids = torch.cat([ids, drawn], 1)
    before = ids[:, :-1]
    sides = (logp(each[before], ids[:, 1:]) for each in (z, other))
    said = verdict_on(tmp_path, ids[:, 1:], 0, *sides, entropy(z[before]))
    assert said.causes == causes, said.text()


def test_two_rows_of_a_certain_policy_that_are_exchanged_are_named(tmp_path) -> None:
    """Where one row is uncertain the other is certain, so few slots are uncertain on both sides."""
    ids, trainer, rollout, h = forks(0, certain=0.85)
    rollout[[3, 4]] = rollout[[4, 3]]
    said = verdict_on(tmp_path, ids, 0, trainer, rollout, h)
    assert "rows" in said.causes, said.text()


@pytest.mark.few(1)
@pytest.mark.parametrize("growth", [1.5, 6.0])
def test_a_gap_that_grows_along_the_answer_is_corrected(growth, tmp_path) -> None:
    torch.manual_seed(0)
    z = 2 * torch.randn(96, 200, 32)
    size = 0.05 * (1 + (growth - 1) * torch.arange(200) / 200)
    other = z + size[None, :, None] * torch.randn(z.shape)
    ids = torch.distributions.Categorical(logits=other).sample()
    said = verdict_on(tmp_path, ids, 0, logp(z, ids), logp(other, ids), entropy(z))
    assert said.action == "correct", said.text()


def test_a_gap_that_jumps_at_one_place_is_a_mark(tmp_path) -> None:
    torch.manual_seed(0)
    z = 2 * torch.randn(96, 200, 32)
    size = torch.where(torch.arange(200) < 120, 0.05, 0.4)
    other = z + size[None, :, None] * torch.randn(z.shape)
    ids = torch.distributions.Categorical(logits=other).sample()
    said = verdict_on(tmp_path, ids, 0, logp(z, ids), logp(other, ids), entropy(z))
    assert said.action == "unclear"
    assert "the gap jumps at place 1" in said.text()


@pytest.mark.parametrize(
    "number_format", [min(CEILINGS, key=CEILINGS.get), max(CEILINGS, key=CEILINGS.get)]
)
def test_above_the_ceiling_of_the_format_the_gap_is_looked_into(number_format, tmp_path) -> None:
    ceiling = Declared(number_format).ceiling
    for kl, action in ((0.8 * ceiling, "correct"), (1.3 * ceiling, "unclear")):
        dump = write_jsonl(tmp_path / "d.jsonl", gaussian_rows(kl, rows=100))
        said = audit(dump, {}, number_format=number_format).verdict
        assert said.action == action, said.text()
        assert (action == "correct") == ("onepolicy measure MODEL" not in said.sentence)


def test_the_command_line_declares_the_format(tmp_path, capsys) -> None:
    dump = str(write_jsonl(tmp_path / "d.jsonl", gaussian_rows(0.1, rows=100)))
    assert main(["audit", dump]) == 0
    assert "UNCLEAR: LOOK FIRST" in capsys.readouterr().out
    assert main(["audit", dump, "--format", "4bit"]) == 0
    assert "CORRECT IT" in capsys.readouterr().out


def test_a_run_of_ours_says_its_format(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    with pytest.raises(UsageError) as error:
        audit(run, {}, number_format="fp8")
    assert "leave --format out" in str(error.value)


# --- models ---------------------------------------------------------------------------------------


def logp(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def entropy(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits).entropy()


@torch.no_grad()
def logits_of(model, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits.float()


@torch.no_grad()
def sampled(model, prompts: Tensor, new: int, *, prefiller=None, cached=1) -> tuple[Tensor, Tensor]:
    """Return ids [B, P + new] and the log-probabilities [B, new] that they were drawn from.

    prefiller: another model, which has computed the keys of the first `cached` tokens.
    """
    cache = DynamicCache()
    (prefiller or model)(input_ids=prompts[:, :cached], past_key_values=cache, use_cache=True)
    ids, drawn, unseen = prompts, [], prompts[:, cached:]
    for _ in range(new):
        z = model(input_ids=unseen, past_key_values=cache, use_cache=True).logits[:, -1]
        p = z.float().log_softmax(-1)
        unseen = torch.multinomial(p.exp(), 1)
        drawn.append(p.gather(-1, unseen))
        ids = torch.cat([ids, unseen], 1)
    return ids, torch.cat(drawn, 1)


def verdict_on(folder, ids, prompt, trainer, rollout, entropy, **columns):
    """Return the verdict on a dump of these rows, whose values begin behind the prompt."""
    values = {"logp_trainer": trainer, "logp_rollout": rollout, "entropy": entropy} | columns
    rows = []
    for i, tokens in enumerate(ids.tolist()):
        mask = [0] * prompt + [1] * (len(tokens) - prompt)
        row = {name: [0.0] * prompt + each[i].tolist() for name, each in values.items()}
        rows.append({"tokens": tokens, "mask": mask} | row)
    return audit(write_jsonl(folder / "d.jsonl", rows), {}).verdict


def scored(folder, engine, trainer, prompts, *, new=24, **others):
    """Return the verdict on what `engine` samples and `trainer` scores. others: column -> model."""
    torch.manual_seed(5)
    ids, rollout = sampled(engine, prompts, new)
    first = prompts.shape[1]
    z = logits_of(trainer, ids)[:, first - 1 : -1]
    answer = ids[:, first:]
    columns = {
        name: logp(logits_of(model, ids)[:, first - 1 : -1], answer)
        for name, model in others.items()
    }
    return verdict_on(folder, ids, first, logp(z, answer), rollout, entropy(z), **columns)


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    """24 problems with 8 siblings each."""
    torch.manual_seed(0)
    digits, signs = torch.randint(10, (24, 5)), torch.randint(3, (24, 4))
    texts = [
        "".join(f"{d}{s}" for d, s in zip(row, [*("+-*"[i] for i in sign), "="], strict=True))
        for row, sign in zip(digits.tolist(), signs.tolist(), strict=True)
    ]
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    return torch.tensor([tokenizer(text)["input_ids"] for text in texts]).repeat_interleave(8, 0)


def changed(model, name_part: str, change):
    """Return a copy whose matrices with this in their name are changed."""
    out = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in out.named_parameters():
            if name_part in name and weight.ndim >= 2 and "embed" not in name:
                weight.copy_(change(weight))
    return out


def rounded(bits: int):
    def change(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (2 ** (bits - 1) - 1)
        return (weight / scale).round() * scale

    return change


def noisy(share: float):
    def change(weight: Tensor) -> Tensor:
        torch.manual_seed(3)
        return weight + torch.randn_like(weight) * weight.std() * share

    return change


@pytest.mark.full
def test_a_real_policy_with_coarse_weights_or_other_experts_is_not_accused(
    policy, prompts, tmp_path
) -> None:
    for engine in (
        copy.deepcopy(policy).to(torch.bfloat16),
        changed(policy, "", rounded(4)),
        changed(policy, "gate.weight", noisy(0.1)),
    ):
        said = scored(tmp_path, engine, policy, prompts)
        assert said.action in ("nothing", "correct"), said.text()
    said = scored(tmp_path, policy, changed(policy, "", rounded(4)), prompts)  # QLoRA
    assert said.action in ("nothing", "correct"), said.text()


def test_a_real_policy_whose_weights_did_not_arrive_is_looked_into(
    policy, prompts, tmp_path
) -> None:
    newer = changed(policy, "experts", noisy(1.5))
    said = scored(tmp_path, policy, newer, prompts)
    assert (said.action, said.causes) == ("unclear", ()), said.text()
    assert said.sentence.startswith("Look first")
    for column, words in (("logp_previous", "last weight update"), ("logp_base", "the adapter")):
        said = scored(tmp_path, policy, newer, prompts, **{column: policy})
        assert said.causes == ("stale",), said.text()
        assert words in said.text()


@pytest.mark.full
def test_a_prefix_that_older_weights_cached_is_looked_into(tmp_path) -> None:
    """The engine kept the prompt's keys and values over an update (vllm-omni#6739)."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    trainer = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        trainer.lm_head.weight.mul_(4)
    engine = copy.deepcopy(trainer)
    older = changed(trainer, "", noisy(0.04))
    prompts = torch.randint(128, (64, 30))
    prompts[:, :24] = prompts[0, :24]
    for who, action in ((engine, "nothing"), (older, "unclear")):
        torch.manual_seed(5)
        ids, rollout = sampled(engine, prompts, 30, prefiller=who, cached=24)
        z = logits_of(trainer, ids)[:, 29:-1]
        answer = ids[:, 30:]
        said = verdict_on(tmp_path, ids, 30, logp(z, answer), rollout, entropy(z))
        assert said.action == action, said.text()
        assert action == "nothing" or "a prefix cached from older weights" in said.sentence


def test_attention_sinks_that_the_trainer_drops_are_looked_into(tmp_path) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.1,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    engine = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        engine.lm_head.weight.mul_(3)
        for layer in engine.model.layers:
            layer.self_attn.sinks.normal_(-1.0, 0.5)
    trainer = copy.deepcopy(engine)
    with torch.no_grad():
        for layer in trainer.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
    said = scored(tmp_path, engine, trainer, torch.randint(128, (48, 6)))
    assert said.action == "unclear", said.text()
    assert "attention sinks" in said.sentence
