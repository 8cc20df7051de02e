"""Logits in chunks: scores and gradients are those of whole logits, in every family."""

import copy
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from onepolicy.invariant.enable import enable_invariant
from onepolicy.models.chunk_size import MARK, slots_per_chunk
from onepolicy.models.fp32_head import Fp32Head
from onepolicy.models.logits_chunks import install_logits_chunks, map_logits
from onepolicy.models.prepare import prepare_for_training
from onepolicy.train import forward as scoring
from onepolicy.train.forward import logits_chunk
from onepolicy.train.rescore import change_logits
from support.examples import examples
from support.families import TABLE
from support.learner_steps import batch_of
from support.models import BASE, CONFIGS, HEADS, VOCAB, make
from support.rank_cases import CASES, batch_for, learner_on, one_step
from support.replay_models import same_bits

CPU = torch.device("cpu")
TRAINABLE = int(batch_of().trainable.sum())


def small(*, tied=False, bias=False, banned=None):
    """Return a dense model of one layer. banned: a token that its head rules out."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS["qwen3_dense"])
    config.num_hidden_layers, config.tie_word_embeddings = 1, tied
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    if bias or banned is not None:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    prepare_for_training(model, CPU)
    if banned is not None:
        model.lm_head.bias.data[banned] = -torch.inf
    return model


def batch_at(temperatures, top=0):
    generator = torch.Generator().manual_seed(0)
    batch = batch_of().replace(temperature=torch.tensor(temperatures))
    if top:
        likely = torch.rand(batch.num_slots, VOCAB, generator=generator).topk(top).indices
        batch = batch.replace(top_ids=likely.int())
    return batch


def scores_and_gradients(model, batch, chunk, **options):
    """Return the tensors of Scored, and the gradients of a sum over those with a graph."""
    setattr(model, MARK, chunk)
    model.zero_grad(set_to_none=True)
    scored = scoring.forward(model, batch, **options)
    weight = torch.linspace(-1, 2, batch.num_slots)
    loss = (weight * scored.logp).sum()
    if scored.entropy.requires_grad:
        loss = loss + (weight.flip(0) * scored.entropy).sum()
    found = [scored.logp, scored.entropy]
    if scored.top is not None:
        finite = torch.where(scored.top.isfinite(), scored.top, 0.0)
        loss = loss + 0.1 * (weight[:, None] * finite).sum()
        found += [scored.top, *(scored.trainer_top or ())]
    loss.backward()
    return [t.detach() for t in found], {n: p.grad for n, p in model.named_parameters()}


def assert_near(found, expected, tolerance=1e-5):
    """Compare gradients by the norm of each parameter's."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].isfinite().all(), name
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert float(error) < tolerance, name


def compare_chunks(model, batch, chunk, *, atol, rtol=0, tolerance=1e-5, **options):
    """Compare scores and gradients in chunks with those of whole logits."""
    whole, expected = scores_and_gradients(model, batch, 0, **options)
    parts, found = scores_and_gradients(model, batch, chunk, **options)
    for own, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol)
    assert_near(found, expected, tolerance)


def check_bits(model, batch, chunk, **options):
    whole, expected = scores_and_gradients(model, batch, 0, **options)
    parts, found = scores_and_gradients(model, batch, chunk, **options)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
    assert same_bits(found, expected)


@pytest.mark.full
@examples(25)
@given(
    chunk=st.integers(1, TRAINABLE - 1),
    temperatures=st.lists(st.floats(0.3, 3.0), min_size=8, max_size=8),
    tied=st.booleans(),
    bias=st.booleans(),
    banned=st.none() | st.integers(0, VOCAB - 1),
    top=st.integers(0, 5),
    entropy_graph=st.booleans(),
    trainer_top=st.booleans(),
)
def test_chunks_change_rounding_only(
    chunk, temperatures, tied, bias, banned, top, entropy_graph, trainer_top
):
    batch, options = batch_at(temperatures, top), {"entropy_graph": entropy_graph}
    if banned is not None:  # no sample holds a token that its policy rules out
        allowed = torch.where(batch.target_ids == banned, (banned + 1) % VOCAB, batch.target_ids)
        batch = batch.replace(target_ids=allowed)
    options["trainer_top"] = trainer_top and banned is None
    model = small(tied=tied, bias=bias, banned=banned)
    compare_chunks(model, batch, chunk, rtol=1e-5, atol=2e-5, **options)


def test_each_slot_has_its_own_temperature_and_token_by_hand():
    """The written-out log-softmax of every slot's row, one slot to a chunk."""
    model, batch = small(), batch_at([0.5, 1.0, 2.0, 0.7, 1.3, 0.9, 1.1, 3.0])
    slots = batch.trainable.nonzero()[:, 0]
    with torch.no_grad():
        logits = scoring.tempered_logits(model, batch.replace(temperature=torch.ones(8)), slots)
        setattr(model, MARK, 1)
        found = scoring.forward(model, batch).logp
    for row, slot in zip(logits, slots.tolist(), strict=True):
        heat = float(batch.temperature[batch.segment[slot]])
        expected = row[batch.target_ids[slot]] / heat - (row / heat).logsumexp(-1)
        assert float(found[slot]) == pytest.approx(float(expected), abs=1e-5)
    assert not found[~batch.trainable].any()


def test_one_chunk_is_the_whole_to_the_bit(monkeypatch):
    def never(*_, **__):
        raise AssertionError("all slots fit one chunk, so nothing is computed again")

    monkeypatch.setattr(scoring, "map_logits", never)
    model, batch = small(tied=True), batch_at([0.8] * 8, top=3)
    for chunk in (TRAINABLE, TRAINABLE + 1):
        check_bits(model, batch, chunk, entropy_graph=True, trainer_top=True)


@pytest.mark.parametrize("float32_head", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_bfloat16_model_with_and_without_a_float32_head(tied, float32_head):
    model, batch = small(tied=tied).to(torch.bfloat16), batch_at([0.8] * 8)
    if float32_head:
        Fp32Head(model, field="model.lm_head")
    atol = 1e-5 if float32_head else 0.05
    compare_chunks(model, batch, 16, atol=atol, tolerance=0.05)  # bfloat16 sums of a few chunks
    assert model.lm_head.weight.grad.dtype == torch.bfloat16


def test_autocast_reaches_the_recomputed_chunks():
    model, batch = small(), batch_at([0.8] * 8)
    dtypes = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: dtypes.append(out.dtype))
    options = {"autocast": torch.bfloat16, "entropy_graph": True}
    compare_chunks(model, batch, 16, atol=0.05, tolerance=0.05, **options)
    assert set(dtypes) == {torch.bfloat16}


CAP, SCALE = {"final_logit_softcapping": 3.0}, {"logit_scale": 0.3}
CAPPED = {"gemma2": CAP, "gemma3_text": CAP, "vaultgemma": CAP, "nanochat": CAP}
CAPPED |= {"granite": {"logits_scaling": 3.0}, "cohere": SCALE, "cohere2": SCALE}


def model_of(name):
    if name in TABLE:
        return TABLE[name].model().eval()
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **BASE, **HEADS, **CAPPED[name])
    return AutoModelForCausalLM.from_config(config).eval()


def logits_of(model, chunk):
    """Return logits [7, V] in chunks of at most `chunk` slots; 0: by the family alone."""
    ids, slots = torch.arange(3, 20) % VOCAB, torch.tensor([2, 3, 5, 8, 9, 12, 16])
    arguments = {"input_ids": ids[None] % model.config.get_text_config().vocab_size}
    arguments |= {"position_ids": torch.arange(len(ids))[None], "use_cache": False}
    if not chunk:
        return model(**arguments, logits_to_keep=slots).logits[0]
    return map_logits(model, slots, lambda logits, rows: (logits,), chunk, **arguments)[0]


@pytest.mark.few(6)
@torch.no_grad()
@pytest.mark.parametrize("family", [*TABLE, *CAPPED])
def test_logits_of_every_family(family):
    model = model_of(family)
    install_logits_chunks(model, 3)
    assert logits_chunk(model) == 3
    whole = logits_of(model, 0)
    assert torch.equal(logits_of(model, 7), whole)
    torch.testing.assert_close(logits_of(model, 3), whole, rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("family", CAPPED)
def test_gradients_go_through_caps_and_scales(family):
    model, gradients = model_of(family), []
    for chunk in (0, 3):
        model.zero_grad(set_to_none=True)
        logits_of(model, chunk).log_softmax(-1)[:, 5].sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert_near(gradients[1], gradients[0])
    seen = []  # the cap or scale is after the head, not in it
    model.lm_head.register_forward_hook(lambda module, inputs, out: seen.append(out[0]))
    assert not torch.allclose(logits_of(model, 0), seen[0])


def twice(plain):
    """Return a forward that calls the base model twice."""

    def forward(**arguments):
        plain(**arguments)
        return plain(**arguments)

    return forward


def centred(plain):
    """Return a forward whose logits depend on all tokens of the call."""

    def forward(**arguments):
        out = plain(**arguments)
        whole = plain(**{**arguments, "logits_to_keep": 0}).logits
        out.logits = out.logits - whole.mean(1, keepdim=True)
        return out

    return forward


@pytest.mark.parametrize("change", [twice, centred])
def test_a_family_that_cannot_be_chunked_is_named_and_stays_whole(change, caplog):
    model, batch = small(), batch_at([1.0] * 8)
    model.forward = change(model.forward)
    with caplog.at_level(logging.WARNING):
        install_logits_chunks(model, 3)
    assert [r.getMessage().count("Qwen3ForCausalLM") for r in caplog.records] == [1]
    assert "train.logits_chunk" in caplog.text
    assert logits_chunk(model) == 0
    assert scoring.forward(model, batch).logp.isfinite().all()


def test_hooks_of_logits_see_them_whole():
    model, batch, shapes = small(), batch_at([1.0] * 8), []
    setattr(model, MARK, 3)

    def double(logits):
        shapes.append(tuple(logits.shape))
        return 2 * logits

    with torch.no_grad():
        with change_logits(model, double):
            changed = scoring.forward(model, batch).logp
        assert logits_chunk(model) == 3
        hot = scoring.forward(model, batch.replace(temperature=batch.temperature / 2)).logp
    assert shapes == [(TRAINABLE, VOCAB)]
    torch.testing.assert_close(changed, hot, rtol=1e-5, atol=1e-5)


def test_invariant_numerics_stay_whole():
    model, batch = small(), batch_at([0.8] * 8)
    enable_invariant(model)
    check_bits(model, batch, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3_moe")
    make("qwen3_moe").save_pretrained(path)
    return path


def test_a_run_has_chunks_where_a_micro_batch_can_have_more_slots(folder, subtests):
    for overrides, slots in (
        ([], 0),  # 1 GiB of logits are more slots than a micro-batch has
        (["train.logits_chunk=3"], 3),
        (["train.logits_chunk=1000"], 0),
        (["train.logits_chunk=0"], 0),
        (["train.logits_chunk=3", "numerics=on-policy"], 0),
    ):
        with subtests.test(overrides=overrides):
            assert logits_chunk(learner_on(None, folder, overrides).model) == slots


@pytest.mark.full
@pytest.mark.parametrize("case", ["critic_kl_entropy", "centering", "recompute", "bypass", "reuse"])
def test_a_step_in_chunks_is_a_step(case, folder):
    whole = learner_on(None, folder, CASES[case])
    parts = learner_on(None, folder, [*CASES[case], "train.logits_chunk=3"])
    (before, metrics, _), (scored, found, _) = (one_step(x, batch_for(x)) for x in (whole, parts))
    for name in ("logp_old", "entropy", "logp_ref", "top_logp_old", "trainer_top_logp"):
        if getattr(before, name) is not None:
            own = getattr(scored, name)
            torch.testing.assert_close(own, getattr(before, name), rtol=1e-5, atol=1e-5)
    assert found["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-4)
    after = dict(whole.named_weights())
    for name, tensor in parts.named_weights():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=2e-5)


def test_slots_of_a_chunk():
    assert slots_per_chunk(None, 151_936) == 1728  # 27 * 64; 1 GiB are 1766
    assert 4 * 1728 * 151_936 <= 2**30
    assert slots_per_chunk(None, 2**30) == 64
    assert (slots_per_chunk(0, 100), slots_per_chunk(7, 100)) == (0, 7)
