"""On-policy numerics: each operator's definition, and one result a row in any batch."""

from contextlib import suppress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from onepolicy.config import UsageError
from onepolicy.invariant import enable, ops
from onepolicy.invariant.attention import attend
from onepolicy.invariant.ops import TERMS
from onepolicy.invariant.switch import TILE
from onepolicy.models.embedding_bag_matmul import sum_rows, weighted_rows

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 10_000)


@pytest.fixture(autouse=True)
def one_thread_after():
    yield
    torch.set_num_threads(1)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chains(x, weight):
    """Compute x @ weight by the definition: chains of TERMS fused multiply-adds, in order."""
    out = None
    for start in range(0, x.shape[1], TERMS):
        total = torch.zeros(len(x), weight.shape[1])
        for k in range(start, min(start + TERMS, x.shape[1])):
            total = (total.double() + x[:, k : k + 1].double() * weight[k].double()).float()
        out = total if out is None else out + total
    return out


@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 420), st.integers(1, 70), DTYPES, SEEDS)
def test_linear_is_its_definition(rows, terms, columns, dtype, seed):
    shapes = ((rows, terms), (columns, terms), (columns,))
    x, weight, bias = (normal(*shape, seed=seed).to(dtype) for shape in shapes)
    expected = (chains(x.float(), weight.float().T) + bias.float()).to(dtype)
    assert torch.equal(ops.linear(x, weight, bias), expected)


@settings(max_examples=40)
@given(st.integers(1, 400), st.integers(1, 300), st.integers(1, 300), DTYPES, SEEDS)
@example(64, 129, 256, torch.float32, 0)  # oneDNN, a slice of the weights
def test_a_row_of_linear_is_the_same_in_any_batch(rows, terms, columns, dtype, seed):
    x = normal(rows, terms, seed=seed).to(dtype)
    weight = normal(columns, terms, seed=seed + 1).to(dtype)
    alone = ops.linear(x[-1:], weight)
    assert torch.equal(ops.linear(x, weight)[-1:], alone)
    assert torch.equal(ops.linear(x.flip(0), weight)[:1], alone)


def test_a_weight_that_is_a_slice_of_another_is_the_same():
    for terms in (TERMS, TERMS + 1):
        x, weight = normal(333, terms), normal(64, terms, seed=1)
        apart = F.pad(weight, (1, 2))[:, 1:-2]
        assert not apart.is_contiguous()
        assert torch.equal(ops.linear(x, apart), ops.linear(x, weight))
        assert torch.equal(ops.linear(x[:3], apart), ops.linear(x, weight)[:3])


def test_a_row_of_linear_is_the_same_on_any_number_of_threads(subtests):
    """Threads share rows and columns out. A share of one to three would use another kernel."""
    for rows, terms, columns in ((17, 64, 16), (33, 128, 33), (43, 200, 96), (300, 128, 130)):
        x, weight = normal(rows, terms), normal(columns, terms, seed=1)
        torch.set_num_threads(1)
        expected = ops.linear(x, weight)
        for threads in (2, 3):
            with subtests.test(rows=rows, terms=terms, columns=columns, threads=threads):
                torch.set_num_threads(threads)
                assert torch.equal(ops.linear(x, weight), expected)


def test_large_products_take_another_kernel_and_agree():
    """oneDNN begins at `linear.MIN_MULTIPLICATIONS`. The same rows alone use MKL."""
    x, weight = normal(700, 128), normal(256, 128, seed=1)
    assert torch.equal(ops.linear(x, weight)[200:216], ops.linear(x[200:216], weight))
    assert torch.equal(ops.linear(x, weight)[:40], chains(x[:40], weight.T))


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 300), st.integers(1, 60), SEEDS)
def test_batched_is_its_definition(batch, rows, terms, columns, seed):
    x, y = normal(batch, rows, terms, seed=seed), normal(batch, terms, columns, seed=seed + 1)
    expected = torch.stack([chains(a, b) for a, b in zip(x, y, strict=True)])
    assert torch.equal(ops.batched_matmul(x, y), expected)


@settings(max_examples=20)
@given(rows=st.integers(1, 40), terms=st.integers(1, 300), columns=st.integers(1, 40), seed=SEEDS)
def test_weighted_rows_are_the_same_chains(rows, terms, columns, seed):
    x, weight = normal(rows, terms, seed=seed), normal(terms, columns, seed=seed + 1)
    index = torch.arange(terms).expand(rows, -1).contiguous()
    assert torch.equal(weighted_rows(weight, index, x, TERMS), chains(x, weight))


def test_sum_rows_adds_in_order():
    rows = normal(6, 5)
    two = [(rows[0] + rows[1]) + rows[2], (rows[3] + rows[4]) + rows[5]]
    assert torch.equal(sum_rows(rows, 2), torch.stack(two))


ELEMENTWISE = pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus", "gelu"])


@ELEMENTWISE
@settings(max_examples=15)
@given(size=st.integers(1, 3000), offset=st.integers(0, 40), dtype=DTYPES)
def test_elementwise_is_the_same_at_any_place(name, size, offset, dtype):
    x = (6 * normal(size, seed=size)).to(dtype)
    function = getattr(ops, name)
    assert torch.equal(function(torch.cat([x.new_zeros(offset), x]))[offset:], function(x))
    assert torch.equal(function(x)[-1:], function(x[-1:].clone()))


@ELEMENTWISE
def test_elementwise_values_and_gradients_are_torchs(name):
    x = torch.cat([8 * normal(200), torch.tensor([-300.0, -90.0, 0.0, 90.0, 300.0])])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = getattr(ops, name)(ours), getattr(F, name)(theirs)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    a.sum().backward()
    b.sum().backward()
    assert torch.isfinite(ours.grad).all()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def bfloat16_layer():
    layer = torch.nn.Linear(16, 32, bias=False).requires_grad_(False)
    layer.weight.data = normal(32, 16).bfloat16()
    return layer


def test_an_engine_keeps_a_weight_in_float32_until_it_changes():
    layer, x = bfloat16_layer(), normal(16, 16, seed=1).bfloat16()
    weight = layer.weight
    ops.keep_in_float32(layer)
    with torch.inference_mode():
        kept = ops.in_float32(weight)
        assert ops.in_float32(weight) is kept
        assert torch.equal(kept, weight.float())
    before = ops.linear(x, weight)
    with torch.no_grad():
        assert ops.in_float32(weight) is not kept  # with a graph none is kept
        weight.copy_(-weight)
    with torch.inference_mode():
        assert torch.equal(ops.in_float32(weight), weight.float())
        assert torch.equal(ops.linear(x, weight), -before)
    assert ops.in_float32(before.float()).dtype == torch.float32


def test_a_model_that_is_not_an_engines_keeps_no_copy_in_any_mode():
    """The optimiser writes rounded masters through `weight.data`, which torch does not count."""
    weight = bfloat16_layer().weight
    with torch.inference_mode():
        assert ops.in_float32(weight) is not ops.in_float32(weight)
    weight.data.copy_(-weight)
    with torch.inference_mode():
        assert torch.equal(ops.in_float32(weight), weight.float())


@pytest.mark.parametrize("how", ["data.copy_", "data", "fails"])
def test_weights_that_are_rewritten_in_any_way_have_no_old_copy(how):
    layer = bfloat16_layer()
    ops.keep_in_float32(layer)
    with torch.inference_mode():
        before = ops.in_float32(layer.weight)
    with suppress(KeyError), ops.rewriting(layer):
        if how == "data":
            layer.weight.data = -layer.weight
        else:
            layer.weight.data.copy_(-layer.weight)
        if how == "fails":
            raise KeyError
    with torch.inference_mode():
        assert torch.equal(ops.in_float32(layer.weight), -before)
        assert ops.in_float32(layer.weight) is ops.in_float32(layer.weight)


def test_gradients_of_linear_are_torchs():
    inputs = [normal(30, 200), normal(17, 200, seed=1), normal(17, seed=2)]
    for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        ours, theirs = ([x.to(dtype, copy=True).requires_grad_() for x in inputs] for _ in range(2))
        (ops.linear(*ours).float() ** 2).sum().backward()
        (F.linear(*theirs).float() ** 2).sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=rtol, atol=1e-2)


def causal(q, key, value, queries, keys, *, window=None, sinks=None):
    """Run `attend` of these queries over this many keys, masked."""
    place, own = torch.arange(keys), torch.tensor(queries)[:, None]
    hidden = place > own
    if window is not None:
        hidden |= place <= own - window
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    seen = key[:, :, :keys], value[:, :, :keys]
    return attend(q[:, queries], *seen, bias=bias, scale=0.3, sinks=sinks)


@settings(max_examples=25)
@given(
    st.integers(1, 700),
    st.sampled_from([8, 24, 64, 192]),
    st.sampled_from([None, 3, 100]),
    st.booleans(),
    st.data(),
)
def test_a_query_is_the_same_alone_and_among_others(length, width, window, sinks, data):
    """Decoding equals prefilling, in chunks or whole, beside a longest row of any length."""
    sink = normal(4, seed=3) if sinks else None
    size = ops.round_up(length, TILE)
    q, key = normal(1, size, 4, width), normal(1, 2, size, width, seed=1)
    value = normal(1, 2, size, 16, seed=2)
    start = data.draw(st.integers(0, length - 1))
    rows = {"window": window, "sinks": sink}
    whole = causal(q, key, value, list(range(length)), size, **rows)[0]
    chunk = causal(q, key, value, list(range(start, length)), size, **rows)[0]
    alone = causal(q, key, value, [start], ops.round_up(start + 1, TILE), **rows)[0]
    assert torch.equal(whole[start:], chunk)
    assert torch.equal(whole[start : start + 1], alone)


def test_attention_is_attention():
    q, key, value = normal(1, 64, 4, 16), normal(1, 2, 64, 16, seed=1), normal(1, 2, 64, 16, seed=2)
    place, more = torch.arange(64), {"scale": 0.3, "enable_gqa": True}
    for window in (None, 20):
        seen = (place <= place[:, None]) & (place > place[:, None] - (window or 64))
        expected = F.scaled_dot_product_attention(
            q.transpose(1, 2), key, value, attn_mask=seen, **more
        ).transpose(1, 2)
        ours = causal(q, key, value, list(range(64)), 64, window=window)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_of_attention_are_torchs(sinks):
    inputs = [normal(2, 33, 4, 16), normal(2, 2, 48, 16, seed=1)]
    inputs += [normal(2, 2, 48, 16, seed=2), normal(4, seed=3)]
    hidden = torch.arange(48) > torch.arange(33)[:, None] + 10
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    own_sink = ours[3] if sinks else None
    attend(*ours[:3], bias=bias, scale=0.3, sinks=own_sink).square().sum().backward()
    q, key, value, sink = theirs
    scores = torch.einsum("bqgrd,bgkd->bgrqk", q.unflatten(2, (2, 2)), key) * 0.3 + bias
    if sinks:
        scores = torch.cat([scores, sink.view(2, 2, 1, 1).expand(2, 2, 2, 33, 1)], -1)
    weights = scores.softmax(-1)[..., :48]
    torch.einsum("bgrqk,bgkd->bqgrd", weights, value).square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_this_build_passes():
    enable.check_build.__wrapped__(CPU, 1)


def test_a_build_that_fails_is_refused_by_operator(monkeypatch, subtests):
    """The builds lack padding, do not split long sums, or use torch's own kernel."""
    for attribute, value, named in (
        ("TILE", 1, "linear 32x128 in torch.float32"),
        ("TERMS", 100_000, "(linear 300x24|the sum of 168 weighted rows)"),  # by processor
        ("silu", F.silu, "silu"),
        ("sigmoid", torch.sigmoid, "sigmoid"),
    ):
        with subtests.test(attribute), monkeypatch.context() as patch:
            if attribute == "TERMS" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
                pytest.skip("this processor runs torch's default kernels")
            patch.setattr(ops, attribute, value)
            named = f"({named}|attention without sinks)"  # of AVX2, which fails there first
            words = f"numerics: {named}.*torch {torch.__version__.partition('+')[0]}"
            with pytest.raises(UsageError, match=words):
                enable.check_build.__wrapped__(CPU, 1)
