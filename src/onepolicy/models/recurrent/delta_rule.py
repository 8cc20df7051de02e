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

from onepolicy.models.recurrent.segments import Row, without_autocast

CHUNK = 64  # tokens, as in fla and in transformers
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
    """Return o [1, T, H, Dv], and the samples' last states, which the row has kept."""
    with without_autocast(query):
        tokens = float_tokens(query, key, value, g, beta, normed=use_qk_l2norm_in_kernel)
        compute = _next if row.decodes else scan
        out, states = compute(row, *tokens)
    return out.to(query.dtype)[None], states


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


def _next(
    row: Row, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `scan` of one token a sample, by the rule itself."""
    state = row.before(STATE, q, *k.shape[1:], v.shape[-1])
    if decay.dim() == 2:
        decay = decay[..., None]
    state = state * decay.exp()[..., None]
    written = b[..., None] * (v - (k[:, :, None] @ state)[:, :, 0])
    state = torch.addcmul(state, k[..., None], written[:, :, None])
    row.after(STATE, state)
    return (q[:, :, None] @ state)[:, :, 0], state


def scan(
    row: Row, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return o [T, H, Dv] of float32 tokens [T, H, ..], and the states [S, H, Dk, Dv]."""
    per_channel = decay.dim() == 3
    size = CHANNEL_CHUNK if per_channel else CHUNK
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
    new, old = (
        torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
        for x in (vb, kb * faded)
    )
    q, k = q * faded, k * (total[:, :, -1:] - total).exp()
    kept = faded[:, :, -1, :, None]  # [chunks, H, Dk or 1, 1]
    outputs = []

    def advance(step: slice, state: Tensor) -> Tensor:
        written = new[step] - old[step] @ state
        outputs.append(q[step] @ state + reads[step] @ written)
        return state * kept[step] + k[step].mT @ written

    before = row.before(STATE, q, q.shape[1], k.shape[-1], v.shape[-1])
    states = chunks.scan(before, advance)
    row.after(STATE, states)
    return chunks.read(torch.cat(outputs).transpose(1, 2)), states
