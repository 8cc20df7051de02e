"""The gated delta rule of the on-policy mode: one function for decoding, prefilling and packing.

The equations are those of `models/recurrent/delta_rule.py`. Chunks of TILE tokens begin at the same
tokens of a sample on every path. Columns of a chunk that are not fed yet have weight 0, which
changes no bit of a token before them. Products are those of `ops`, and a triangular system is
solved row by row.

Of an open chunk a row of the engine keeps everything that later tokens of the chunk read, beside
the state after its last whole chunk. So a decoded token computes one row of each product: the sum
of weighted rows of the engine's tables (`embedding_bag_matmul.py`), which are not copied. On other
devices than a CPU the open chunk is computed anew for every token.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onepolicy.invariant import ops
from onepolicy.invariant.strict import invariant_operator
from onepolicy.invariant.switch import TILE
from onepolicy.models.embedding_bag_matmul import weighted_rows
from onepolicy.models.recurrent import delta_rule as fast
from onepolicy.models.recurrent.segments import Chunks, Row, without_autocast
from onepolicy.replay.private_names import past_function_modes

# A sample's states beside fast.STATE: of the tokens after its last whole chunk
KEYS = "keys of the open chunk"  # [H, Dk, TILE]
RATES = "decays and rates of the open chunk"  # [H, 2, TILE]
UPDATES = "updates of the open chunk"  # [H, TILE, Dv + Dk]: v b, and k b as the state has faded
INVERSE = "inverse of the open chunk"  # [H, TILE, TILE], of its system
WRITTEN = "values written in the open chunk"  # [H, TILE, Dv]


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
) -> tuple[Tensor, Tensor]:
    """Return o [1, T, H, Dv], beside an empty state: the row has kept the samples' states."""
    past = nullcontext() if ops.fixed_shapes(query.device) else past_function_modes()
    with without_autocast(query), past:  # on a CPU nothing here is replaced
        tokens = fast.float_tokens(query, key, value, g, beta, normed=use_qk_l2norm_in_kernel)
        if torch.is_grad_enabled():
            out = _DeltaRule.apply(row, *tokens)
        elif _decodes_by_tables(row):
            out = _next(row, *tokens)
        else:
            out = _scan(row, *tokens)
    return out.to(query.dtype)[None], out.new_empty(0)


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
            out = fast.scan(ctx.row, *tokens)
        grads = iter(torch.autograd.grad(out, [x for x in tokens if x.requires_grad], grad))
        return None, *(next(grads) if wants else None for wants in wanted)


def _scan(row: Row, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor) -> Tensor:
    """Return o [T, H, Dv] of float32 q, k [T, H, Dk], v [T, H, Dv] and decay, b [T, H]."""
    chunks = row.segments.aligned_chunks(TILE)
    k, vb, decay, b = _in_chunks(row, chunks, k, v * b[..., None], decay, b)
    q, total = chunks.fill(q).transpose(1, 2), decay.cumsum(2)
    later = torch.ones(TILE, TILE, dtype=torch.bool, device=q.device).triu(1)
    pairs = (total - total.mT).masked_fill_(later, -torch.inf).exp_()
    system, reads = _product(k * b, k.mT) * pairs, _product(q, k.mT) * pairs
    inverse = _inverse(system)
    faded = total.exp()  # since the chunk's begin
    fading = k * b * faded
    empty = chunks.steps[0].stop if row.begins else 0  # chunks before which a state is 0
    new, old = _product(inverse, vb), _product(inverse[empty:], fading[empty:])
    q, to_end = q * faded, k * (total[:, :, -1:] - total).exp()
    kept, outputs, written = faded[:, :, -1:], [], []

    def advance(step: slice, state: Tensor) -> Tensor:
        if step.stop <= empty:
            written.append(new[step])
            outputs.append(_product(reads[step], written[-1]))
        else:
            read = slice(step.start - empty, step.stop - empty)
            written.append(new[step] - _product(old[read], state))
            outputs.append(_product(q[step], state) + _product(reads[step], written[-1]))
        whole = chunks.whole(step)
        if len(whole) == len(state) or row.states is None:  # then nobody reads other states
            return state * kept[step] + _product(to_end[step].mT, written[-1])
        if not len(whole):
            return state
        ends = torch.from_numpy(whole).to(state.device)
        after = _product(to_end[step][ends].mT, written[-1][ends])
        return state.index_copy(0, ends, state[ends] * kept[step][ends] + after)

    before = row.before(fast.STATE, q, q.shape[1], k.shape[-1], v.shape[-1])
    row.after(fast.STATE, chunks.scan(before, advance))
    if row.states is not None:
        last = chunks.last
        row.after(KEYS, k[last].mT)
        row.after(RATES, torch.cat([decay[last], b[last]], -1).mT)
        row.after(UPDATES, torch.cat([vb[last], fading[last]], -1))
        row.after(INVERSE, inverse[last])
        row.after(WRITTEN, torch.cat(written)[last])
    return chunks.read(torch.cat(outputs).transpose(1, 2))


def _in_chunks(row: Row, chunks: Chunks, *tokens: Tensor) -> tuple[Tensor, ...]:
    """Return k, v b, decay and b in chunks [chunks, H, TILE, ..], after those of open chunks.

    tokens: k [T, H, Dk], v b [T, H, Dv], decay and b [T, H].
    """
    k, vb, decay, b = tokens
    widths = k.shape[-1], vb.shape[-1], 1, 1
    table = chunks.fill(torch.cat([k, vb, decay[..., None], b[..., None]], -1)).transpose(1, 2)
    if row.states is not None and row.segments.fed is not None:
        heads = k.shape[1]
        updates = row.before(UPDATES, k, heads, TILE, widths[1] + widths[0])
        open_chunk = [
            row.before(KEYS, k, heads, widths[0], TILE).mT,
            updates[..., : widths[1]],
            row.before(RATES, k, heads, 2, TILE).mT,
        ]
        column = torch.arange(TILE, device=k.device)
        fed = (column < (row.segments.fed % TILE)[:, None])[:, None, :, None]
        first = table.index_select(0, chunks.inverse)
        table = table.index_copy(0, chunks.inverse, torch.cat(open_chunk, -1).where(fed, first))
    return tuple(x.contiguous() for x in table.split(widths, -1))


def _inverse(system: Tensor) -> Tensor:
    """Return the inverses of unit lower triangles [n, H, TILE, TILE], each row from those above.

    Nothing but what is below the diagonal is read.
    """
    shape, system = system.shape, system.flatten(0, 1)
    inverse = torch.eye(TILE, device=system.device).repeat(len(system), 1, 1)
    rows = torch.arange(len(system) * TILE, device=system.device).view(-1, TILE)
    for j in range(1, TILE):
        if ops.fixed_shapes(system.device):
            above = ops.batched_matmul(system[:, j : j + 1, :j], inverse[:, :j])[:, 0]
        else:
            table, weights = inverse.flatten(0, 1), system[:, j, :j].contiguous()
            above = F.embedding_bag(rows[:, :j], table, mode="sum", per_sample_weights=weights)
        inverse[:, j] -= above
    return inverse.view(shape)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Return x [n, H, M, I] @ y [n, H, I, N]."""
    return ops.batched_matmul(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])


def _decodes_by_tables(row: Row) -> bool:
    """Return whether each sample has one token, which goes on from tokens of earlier rows."""
    if row.states is None or row.states.begins is not None or not row.decodes:
        return False
    return not ops.fixed_shapes(row.segments.device)


@dataclass(frozen=True, slots=True)
class _Places:
    """Places of a decode step's tokens in tables of a layer's shape, by (row, head): n of them."""

    pair: Tensor  # [n] int64, row * H + head
    column: Tensor  # [n, 1] int64, the token's place in its chunk
    place: Tensor  # [n] int64, of (pair, column)
    columns: Tensor  # [n, TILE] int64, of (pair, every column)
    channels: Tensor  # [2 n, Dk] int64, of (pair, key channel), and again
    keys: Tensor  # [n * Dk] int64, of (pair, key channel, column)
    rates: Tensor  # [n * 2] int64, of (pair, 0 or 1, column)
    later: Tensor  # [n, TILE] bool, True behind the token
    own: Tensor  # [n, TILE], 1 at the token, else 0
    others: Tensor  # [n, TILE], 0 at the token, else 1
    whole: Tensor  # int64, those of the n whose chunk has TILE tokens now

    @classmethod
    def of(cls, row: Row, heads: int, width: int) -> _Places:
        """Return the places for keys of `width` channels, made once for all layers of a shape."""
        memo = row.segments.memo
        if (heads, width) not in memo:
            memo[heads, width] = cls._made(row, heads, width)
        found: _Places = memo[heads, width]
        return found

    @classmethod
    def _made(cls, row: Row, heads: int, width: int) -> _Places:
        assert row.states is not None
        assert row.segments.fed is not None
        pair = (row.states.rows[:, None] * heads + torch.arange(heads)).view(-1)
        column = (row.segments.fed % TILE).repeat_interleave(heads)[:, None]
        columns, before = torch.arange(TILE), pair[:, None]
        channels = before * width + torch.arange(width)
        return cls(
            pair,
            column,
            pair * TILE + column[:, 0],
            before * TILE + columns,
            channels.repeat(2, 1),
            (channels * TILE + column).view(-1),
            ((before * 2 + torch.arange(2)) * TILE + column).view(-1),
            columns > column,
            (columns == column).float(),
            (columns != column).float(),
            (column[:, 0] == TILE - 1).nonzero()[:, 0],
        )


def _next(row: Row, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor) -> Tensor:
    """Return `_scan` of one token a sample, on a CPU: the token's row of every product alone."""
    states, (_, heads, width), values = row.states, k.shape, v.shape[-1]
    assert states is not None
    at, like = _Places.of(row, heads, width), q
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # [n, ..]
    decay, b = decay.reshape(-1, 1), b.reshape(-1, 1)

    def table(name: str, rows: int, columns: int) -> Tensor:  # [all rows and heads * rows, columns]
        return states.table(name, like, (heads, rows, columns)).view(-1, columns)

    keys, rates = table(KEYS, width, TILE), table(RATES, 2, TILE)
    keys.view(-1).index_copy_(0, at.keys, k.reshape(-1))
    rates.view(-1).index_copy_(0, at.rates, torch.cat([decay, b], 1).view(-1))
    total = rates.index_select(0, 2 * at.pair).cumsum(1)
    now = total.gather(1, at.column)
    pairs, faded = (now - total).masked_fill_(at.later, -torch.inf).exp_(), now.exp()
    kb = k * b
    system, reads = (_sums(keys, at.channels, kb, q) * pairs).unbind()
    inverse = table(INVERSE, TILE, TILE)
    solved = at.own - weighted_rows(inverse, at.columns, system * at.others)
    inverse.index_copy_(0, at.place, solved)
    updates = table(UPDATES, TILE, values + width)
    updates.index_copy_(0, at.place, torch.cat([v * b, kb * faded], 1))
    new, old = weighted_rows(updates, at.columns, solved).split((values, width), 1)
    state = table(fast.STATE, width, values)
    of_updates, of_state = _sums(state, at.channels, old, q * faded)
    written = table(WRITTEN, TILE, values)
    written.index_copy_(0, at.place, new - of_updates)
    if len(at.whole):
        _end_chunks(at, pairs, faded, keys, written, state)
    return (of_state + weighted_rows(written, at.columns, reads)).view(-1, heads, values)


def _sums(table: Tensor, index: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return x and y [n, I], each multiplied by its rows of a table [.., N]: [2, n, N].

    index: [2 n, I].
    """
    return weighted_rows(table, index, torch.cat([x, y]), ops.TERMS).unflatten(0, (2, -1))


def _end_chunks(
    at: _Places, pairs: Tensor, faded: Tensor, keys: Tensor, written: Tensor, state: Tensor
) -> None:
    """Let the states go on to the ends of the chunks that are whole now. Arguments: of `_next`."""
    ends, width = at.whole, at.channels.shape[1]
    chosen = at.pair[ends]
    to_end = keys.view(-1, width, TILE)[chosen] * pairs[ends, None]
    after = ops.batched_matmul(to_end, written.view(-1, TILE, written.shape[1])[chosen])
    states = state.view(-1, width, state.shape[1])
    states.index_copy_(0, chosen, states[chosen] * faded[ends, :, None] + after)
