"""The selective scans of Mamba and Mamba-2 over packed samples.

h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t' and y_t = h_t C_t + D x_t (arXiv:2312.00752, equation 2).
In Mamba-2 A is a number of the head, so a chunk is a masked product of matrices
(arXiv:2405.21060, section 6). In Mamba it is one of each channel and state, so the scan goes token
by token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onepolicy.models.recurrent.segments import Row, without_autocast

CHUNK = 64  # tokens
STATE = "selective scan"


def mamba2_scan(
    row: Row,
    hidden_states: Tensor,  # [1, T, H, P]
    dt: Tensor,  # [1, T, H]
    A: Tensor,  # [H]
    B: Tensor,  # [1, T, G, N], of H / G heads each
    C: Tensor,  # [1, T, G, N]
    chunk_size: int = CHUNK,
    *,
    D: Tensor,  # [H]
    dt_bias: Tensor,  # [H]
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, None]:
    """Return y [1, T, H, P], beside None if states are asked for: the row keeps them.

    chunk_size: of the family's kernel, which changes rounding alone; the chunks here are CHUNK.
    """
    with without_autocast(hidden_states):
        x, b, c = (t[0].float() for t in (hidden_states, B, C))
        steps = F.softplus(dt[0].float() + dt_bias.float()).clamp(*dt_limit)
        out = _scan_heads(row, x * steps[..., None], steps * A.float(), b, c)
        out = out + D.float()[:, None] * x
    out = out.to(hidden_states.dtype)[None]
    if return_final_states:
        return out, None
    return out


def _scan_heads(row: Row, x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return h_t C_t [T, H, P] of x [T, H, P], decay [T, H] and b, c [T, G, N]."""
    chunks = row.chunks(CHUNK)
    x, decay, b, c = (chunks.fill(t).transpose(1, 2).contiguous() for t in (x, decay, b, c))
    heads, groups = x.shape[1], b.shape[1]
    total = decay.cumsum(2)  # [chunks, H, size], since the chunk's begin
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=x.device).triu(1)
    pairs = (total[..., None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    reads = (c @ b.mT).repeat_interleave(heads // groups, 1) * pairs
    b, c = (t.repeat_interleave(heads // groups, 1) for t in (b, c))
    added = x.mT @ (b * (total[..., -1:] - total).exp()[..., None])  # [chunks, H, P, N]
    kept = total[..., -1].exp()[..., None, None]
    seen = []

    def advance(step: slice, state: Tensor) -> Tensor:
        seen.append(state)
        return state * kept[step] + added[step]

    row.after(STATE, chunks.scan(row.before(STATE, x, *added.shape[1:]), advance))
    out = reads @ x + (c * total.exp()[..., None]) @ torch.cat(seen).mT
    return chunks.read(out.transpose(1, 2))


def mamba_scan(
    row: Row,
    hidden_states: Tensor,  # [1, D, T]
    dt: Tensor,  # [1, D, T]
    A: Tensor,  # [D, N]
    B: Tensor,  # [1, N, T]
    C: Tensor,  # [1, N, T]
    *,
    D: Tensor,  # [D]
    z: Tensor,  # [1, D, T], a gate
    delta_bias: Tensor,  # [D]
    return_last_state: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, None]:
    """Return y [1, D, T] times the gate, beside None if states are asked for."""
    with without_autocast(hidden_states):
        x, b, c = (t[0].t().float() for t in (hidden_states, B, C))
        steps = F.softplus(dt[0].t().float() + delta_bias.float())
        out = _scan_channels(row, x * steps, steps, A.float(), b, c) + D.float() * x
        out = out * F.silu(z[0].t().float())
    out = out.to(hidden_states.dtype).t()[None]
    if return_last_state:
        return out, None
    return out


def _scan_channels(row: Row, x: Tensor, steps: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return h_t C_t [T, D] of x and steps [T, D], a [D, N] and b, c [T, N]."""
    chunks = row.chunks(1)
    x, steps, b, c = (chunks.fill(t)[:, 0] for t in (x, steps, b, c))
    outputs = []

    def advance(step: slice, state: Tensor) -> Tensor:
        state = (steps[step, :, None] * a).exp() * state + x[step, :, None] * b[step, None]
        outputs.append((state * c[step, None]).sum(-1))
        return state

    row.after(STATE, chunks.scan(row.before(STATE, x, *a.shape), advance))
    return chunks.read(torch.cat(outputs)[:, None])
