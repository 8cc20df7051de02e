"""The gated delta rule of the on-policy mode: one function for decoding, prefilling and packing.

The equations are those of `models/recurrent/delta_rule.py`. Chunks of TILE tokens begin at the same
tokens of a sample on every path: a decoding row keeps the state after its last whole chunk and the
tokens since, and computes its open chunk anew for every token. Columns of a chunk that are not fed
yet are zeros, which change no bit of a token before them. Products are those of `ops`, and every
triangular system is one of TILE rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepolicy.invariant import ops
from onepolicy.invariant.strict import invariant_operator
from onepolicy.invariant.switch import TILE
from onepolicy.models.recurrent import delta_rule as fast
from onepolicy.models.recurrent.segments import Chunks, Row, without_autocast

OPEN = "open chunk"  # a sample's state beside fast.STATE: tokens after its last whole chunk


@invariant_operator
def delta_rule(
    row: Row,
    query: Tensor,  # [1, T, H, Dk]
    key: Tensor,  # [1, T, H, Dk]
    value: Tensor,  # [1, T, H, Dv]
    g: Tensor,  # [1, T, H]: logarithm of the decay
    beta: Tensor,  # [1, T, H]
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return o [1, T, H, Dv], beside None: the row has kept the samples' states."""
    with without_autocast(query):
        tokens = fast.float_tokens(query, key, value, g, beta, normed=use_qk_l2norm_in_kernel)
        if torch.is_grad_enabled():
            out = _DeltaRule.apply(row, *tokens)
        else:
            out = _scan(row, *tokens)
    return out.to(query.dtype)[None], None


class _DeltaRule(torch.autograd.Function):
    """`_scan` with the gradient of the fast scan, which may take any kernel.

    Nothing but the tokens is kept: the backward computes the fast scan again.
    """

    @staticmethod
    def forward(ctx: Any, row: Row, *tokens: Tensor) -> Tensor:
        ctx.row = row
        ctx.save_for_backward(*tokens)
        return _scan(row, *tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        tokens = [
            x.detach().requires_grad_(wants)
            for x, wants in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            out, _ = fast.scan(ctx.row, *tokens)
        grads = iter(torch.autograd.grad(out, [x for x in tokens if x.requires_grad], grad))
        return None, *(next(grads) if wants else None for wants in wanted)


def _scan(row: Row, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor) -> Tensor:
    """Return o [T, H, Dv] of float32 q, k [T, H, Dk], v [T, H, Dv] and decay, b [T, H]."""
    widths = k.shape[-1], v.shape[-1], 1, 1
    chunks = row.segments.aligned_chunks(TILE)
    table = _with_open_chunks(row, chunks, torch.cat([k, v, decay[..., None], b[..., None]], -1))
    k, v, decay, b = table.transpose(1, 2).split(widths, -1)  # [chunks, H, TILE, ..]
    q, k, total = chunks.fill(q).transpose(1, 2), k.contiguous(), decay.cumsum(2)
    later = torch.ones(TILE, TILE, dtype=torch.bool, device=q.device).triu(1)
    pairs = (total - total.mT).masked_fill(later, -torch.inf).exp()
    system, reads = _product(k * b, k.mT) * pairs, _product(q, k.mT) * pairs
    inverse = _inverse(system)
    faded = total.exp()  # since the chunk's begin
    new, old = _product(inverse, v * b), _product(inverse, k * b * faded)
    q, k = q * faded, k * (total[:, :, -1:] - total).exp()
    kept, outputs = faded[:, :, -1:], []

    def advance(step: slice, state: Tensor) -> Tensor:
        written = new[step] - _product(old[step], state)
        outputs.append(_product(q[step], state) + _product(reads[step], written))
        whole = chunks.whole(step)
        if len(whole) == len(state) or row.states is None:  # then nobody reads other states
            return state * kept[step] + _product(k[step].mT, written)
        if not len(whole):
            return state
        ends = torch.from_numpy(whole).to(state.device)
        after = _product(k[step][ends].mT, written[ends])
        return state.index_copy(0, ends, state[ends] * kept[step][ends] + after)

    row.after(fast.STATE, chunks.scan(row.before(fast.STATE, q, q.shape[1], *widths[:2]), advance))
    return chunks.read(torch.cat(outputs).transpose(1, 2))


def _with_open_chunks(row: Row, chunks: Chunks, tokens: Tensor) -> Tensor:
    """Return tokens [T, H, ..] in chunks [chunks, TILE, H, ..], after those of open chunks.

    The tokens of the chunks that are open now are kept.
    """
    if row.states is None:
        return chunks.fill(tokens)
    table = row.before(OPEN, tokens, TILE, *tokens.shape[1:])
    if len(chunks.steps) > 1:
        shape = (chunks.count, *table.shape[1:])
        table = table.new_zeros(shape).index_copy_(0, chunks.inverse, table)
    table.flatten(0, 1).index_copy_(0, chunks.places, tokens)
    open_chunks = table.index_select(0, chunks.last)
    row.after(OPEN, open_chunks.masked_fill_(chunks.ends_whole.view(-1, 1, 1, 1), 0.0))
    return table


def _inverse(system: Tensor) -> Tensor:
    """Return the inverses of unit lower triangles [.., TILE, TILE], whose diagonal is not read."""
    ones = torch.eye(TILE, device=system.device).expand_as(system)
    return torch.linalg.solve_triangular(system, ones, upper=False, unitriangular=True)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Return x [n, H, M, I] @ y [n, H, I, N]."""
    return ops.batched_matmul(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])
