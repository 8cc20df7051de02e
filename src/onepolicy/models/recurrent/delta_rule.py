"""The gated delta rule over packed samples, in chunks.

S_t = S_(t-1) a_t (I - b_t k_t k_t') + b_t v_t k_t' and o_t = S_t q_t, where a decay a_t is a number
of the head (Gated DeltaNet, arXiv:2412.06464, equation 10) or one of each key channel (Kimi Linear,
arXiv:2510.26692, section 3). Inside a chunk the updates are one triangular system (the paper's
section 3.3); between chunks a state of [key channels, value channels] goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepolicy.models.embedding_bag_matmul import weighted_rows
from onepolicy.models.recurrent.segments import Row, without_autocast

CHUNK = 64  # tokens, as in fla and in transformers
ENGINE_CHUNK = 32  # prompts of some dozen tokens leave less of a chunk empty
CHANNEL_CHUNK = 16  # with a decay per channel a chunk needs size^2 * channels numbers
EPSILON = 1e-6  # under the root of a key's or a query's norm, as fla's
STATE = "delta rule"


def delta_rule(
    row: Row,
    query: Tensor,  # [1, T, H, Dk]
    key: Tensor,  # [1, T, H, Dk]
    value: Tensor,  # [1, T, H, Dv]
    g: Tensor,  # [1, T, H], or [1, T, H, Dk]: logarithm of the decay
    beta: Tensor,  # [1, T, H]
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return o [1, T, H, Dv], beside an empty state: the row has kept the samples' states."""
    with without_autocast(query):
        tokens = float_tokens(query, key, value, g, beta, normed=use_qk_l2norm_in_kernel)
        compute = _next if row.decodes else scan
        out = compute(row, *tokens)
    return out.to(query.dtype)[None], out.new_empty(0)


def float_tokens(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, normed: bool
) -> tuple[Tensor, ...]:
    """Return an operator's arguments of tokens [T, H, ..] in float32, the queries scaled.

    normed: divide queries and keys by their norms.
    """
    q, k, v, decay, b = (x[0].float() for x in (query, key, value, g, beta))
    if normed:
        q, k = _normed(q), _normed(k)
    return q * q.shape[-1] ** -0.5, k, v, decay, b


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def _next(row: Row, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor) -> Tensor:
    """Return `scan` of one token a sample, by the rule itself.

    A state is read once, for both products, and is written in its place.
    """
    states = row.states
    assert states is not None
    shape = *k.shape[1:], v.shape[-1]
    if states.begins is not None:
        row.after(STATE, row.before(STATE, q, *shape))
    fade = decay.exp()
    if fade.dim() == 2:
        fade = fade[..., None]
    of_k, of_q = _read(row, states.table(STATE, q, shape), k * fade, q * fade)
    written = b[..., None] * (v - of_k)
    states.update(STATE, fade[..., None], k[..., None], written[:, :, None])
    return of_q + (q * k).sum(-1, keepdim=True) * written


def _read(row: Row, table: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products [S, H, Dv] of x and y [S, H, Dk] with the samples' states."""
    states, (samples, heads, width) = row.states, x.shape
    assert states is not None
    if x.device.type != "cpu":
        found = torch.stack([x, y], 2) @ table.index_select(0, states.rows)
        return found[:, :, 0], found[:, :, 1]
    memo = row.segments.memo
    if (STATE, heads, width) not in memo:  # for all layers of a shape
        head = states.rows[:, None] * heads + torch.arange(heads, device=x.device)
        channel = head.view(-1, 1) * width + torch.arange(width, device=x.device)
        memo[STATE, heads, width] = channel.repeat(2, 1)
    found = weighted_rows(
        table.view(-1, table.shape[-1]), memo[STATE, heads, width], torch.cat([x, y])
    )
    of_x, of_y = found.view(2, samples, heads, -1)
    return of_x, of_y


def scan(row: Row, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor) -> Tensor:
    """Return o [T, H, Dv] of float32 tokens [T, H, ..]."""
    per_channel = decay.dim() == 3
    size = CHUNK
    if per_channel:
        size = CHANNEL_CHUNK
    elif row.states is not None:
        size = ENGINE_CHUNK
    chunks = row.chunks(size)
    tables = (q, k, k * b[..., None], v * b[..., None], decay)
    # [chunks, H, size, ..]
    q, k, kb, vb, decay = (chunks.fill(x).transpose(1, 2).contiguous() for x in tables)
    total = decay.cumsum(2)  # since the chunk's begin
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    if per_channel:
        pairs = (total[:, :, :, None] - total[:, :, None]).masked_fill(later[..., None], -torch.inf)
        pairs = pairs.exp() * k[:, :, None]  # [chunks, H, size, size, Dk], of reader and written
        system, reads = (torch.einsum("nhid,nhijd->nhij", x, pairs) for x in (kb, q))
    else:
        pairs = (total[..., None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        system, reads = kb @ k.mT * pairs, q @ k.mT * pairs
        total = total[..., None]
    faded = total.exp()
    begins = row.begins  # then no state is read before the second chunk
    updates = vb
    if not begins or len(chunks.steps) > 1:
        updates = torch.cat([vb, kb * faded], -1)
    solved = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    new, old = solved[..., : vb.shape[-1]], solved[..., vb.shape[-1] :]
    q, k = q * faded, k * (total[:, :, -1:] - total).exp()
    kept = faded[:, :, -1, :, None]  # [chunks, H, Dk or 1, 1]
    outputs = []

    def advance(step: slice, state: Tensor) -> Tensor:
        if begins and step.start == 0:
            outputs.append(reads[step] @ new[step])
            return k[step].mT @ new[step]
        written = new[step] - old[step] @ state
        outputs.append(q[step] @ state + reads[step] @ written)
        return state * kept[step] + k[step].mT @ written

    before = row.before(STATE, q, q.shape[1], k.shape[-1], v.shape[-1])
    row.after(STATE, chunks.scan(before, advance))
    return chunks.read(torch.cat(outputs).transpose(1, 2))
