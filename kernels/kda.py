"""Kimi Delta Attention: the gated delta rule with one decay per key channel, over ragged sequences with a pool of fp32 states.

Per head, state S [K, V], token by token (Kimi Linear, arXiv 2510.26692; facts on K3's architecture, section 6):

    S <- diag(exp(g)) S;   e = v - k S;   S <- S + beta k e^T;   o = q S

q and k are L2-normalised here (eps 1e-6 on the sum of squares) and q is scaled by K^-1/2. `kda_recurrent` is that, literally;
`kda_chunk` is the algebraically equal form that works on 64 tokens at once. Both take the same arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_device, check_shape

CHUNK = 64
BLOCK = 16  # inside a block, decays are formed pair by pair: no exponential of a positive number is ever taken
L2_EPS = 1e-6


def kda_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log-decay g = lower_bound * sigmoid(exp(a_log) * (f + dt_bias)); without a bound -exp(a_log) * softplus(f + dt_bias) (Kimi-Linear).

    f [T, heads * K], a_log [heads], dt_bias [heads * K] -> [T, heads, K] fp32.
    """
    heads = a_log.shape[0]
    check_shape("dt_bias", dt_bias, f.shape[-1])
    x = (f.float() + dt_bias).view(f.shape[0], heads, f.shape[1] // heads)
    if lower_bound is None:
        return -a_log.exp()[:, None] * torch.nn.functional.softplus(x)
    return lower_bound * torch.sigmoid(a_log.exp()[:, None] * x)


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """q, k, g [T, heads, K], v [T, heads, V], beta [T, heads] -> o [T, heads, V] fp32; `state` [slots, heads, K, V] fp32 in place.

    cu_seqlens [N + 1]: sequence i is tokens [cu_seqlens[i], cu_seqlens[i+1]), at least one; it starts from slot read_slots[i]
    (-1: zeros) and leaves its state in write_slots[i]. All reads happen before all writes; write slots are distinct.
    """
    _check(q, k, v, g, beta, state, read_slots, write_slots, cu_seqlens)
    q, k, v, decay, beta = _normalise(q) * q.shape[-1] ** -0.5, _normalise(k), v.float(), g.float().exp(), beta.float()
    s = _read(state, read_slots)  # [N, heads, K, V]
    o = torch.empty_like(v)
    lengths = cu_seqlens.diff().tolist()
    for step in range(max(lengths, default=0)):
        active = [i for i, n in enumerate(lengths) if step < n]
        everyone = len(active) == len(lengths)
        t = cu_seqlens[:-1] + step if everyone else cu_seqlens[torch.tensor(active, device=q.device)] + step
        now = s if everyone else s[active]
        now = now * decay[t].unsqueeze(-1)
        error = v[t] - (k[t].unsqueeze(-2) @ now).squeeze(-2)  # [n, heads, V]
        now = now + (beta[t].unsqueeze(-1) * k[t]).unsqueeze(-1) * error.unsqueeze(-2)
        o[t] = (q[t].unsqueeze(-2) @ now).squeeze(-2)
        if everyone:
            s = now
        else:
            s[active] = now
    state[write_slots] = s
    return o


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """As `kda_recurrent`, in chunks of up to 64 tokens: everything inside chunks at once, then the states from chunk to chunk."""
    _check(q, k, v, g, beta, state, read_slots, write_slots, cu_seqlens)
    lengths = cu_seqlens.diff().tolist()
    if not lengths:
        return torch.empty(v.shape, dtype=torch.float32, device=v.device)
    size = min(CHUNK, -(-max(lengths) // BLOCK) * BLOCK)
    chunks = [-(-n // size) for n in lengths]  # of each sequence
    first = [sum(chunks[:i]) for i in range(len(chunks))]
    place = _places(cu_seqlens, lengths, first, size, q.device)

    def padded(x: Tensor) -> Tensor:
        """[T, heads, *] -> [chunks, heads, size, *]; a padded token (k = 0, beta = 0, g = 0) leaves the state as it is."""
        out = torch.zeros(sum(chunks) * size, *x.shape[1:], dtype=torch.float32, device=x.device)
        out[place] = x.float()
        return out.view(sum(chunks), size, *x.shape[1:]).transpose(1, 2)

    qc, kc = padded(_normalise(q) * q.shape[-1] ** -0.5), padded(_normalise(k))
    vc, bc = padded(v), padded(beta.unsqueeze(-1))
    total = padded(g).cumsum(-2)  # G [C, heads, size, K]: log-decay from the start of the chunk, this token included
    decay = total.exp()
    key_key, query_key = _decayed_products(kc, qc, kc, total)
    # (I + A) V' = beta (V - (K exp(G)) S0), A strictly lower: solved for both right-hand sides at once
    system = torch.eye(size, device=q.device) + torch.tril(key_key * bc, -1)
    solved = torch.linalg.solve_triangular(system, torch.cat((bc * vc, bc * kc * decay), -1), upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    inside = torch.tril(query_key)
    to_end = kc * (total[..., -1:, :] - total).exp()  # [C, heads, size, K]
    last = decay[..., -1, :].unsqueeze(-1)  # [C, heads, K, 1]

    s = _read(state, read_slots)
    out = torch.empty_like(vc)
    for c in range(max(chunks)):
        active = [i for i, n in enumerate(chunks) if c < n]
        at = torch.tensor([first[i] + c for i in active], device=q.device)
        now = s[active]
        value = u[at] - w[at] @ now
        out[at] = (qc[at] * decay[at]) @ now + inside[at] @ value
        s[active] = last[at] * now + to_end[at].transpose(-1, -2) @ value
    state[write_slots] = s
    return out.transpose(1, 2).reshape(-1, *v.shape[1:])[place]


def _decayed_products(a1: Tensor, a2: Tensor, b: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """P[i, j] = sum_c a[i, c] b[j, c] exp(G[i, c] - G[j, c]) for j <= i (elsewhere anything), for two a's: [..., size, size] each.

    Blocks left of the diagonal are matrix products, with decays measured from the row block's first token (both factors <= 1);
    on the diagonal the differences are formed pair by pair.
    """
    size = total.shape[-2]
    products = [torch.zeros(*a.shape[:-1], size, dtype=a.dtype, device=a.device) for a in (a1, a2)]
    for start in range(0, size, BLOCK):
        rows = slice(start, start + BLOCK)
        g = total[..., rows, :]
        pair = (g.unsqueeze(-2) - g.unsqueeze(-3)).clamp(max=0).exp() * b[..., rows, :].unsqueeze(-3)  # [..., i, j, c]
        from_start = (g - g[..., :1, :]).exp()
        before = b[..., :start, :] * (g[..., :1, :] - total[..., :start, :]).exp()
        for product, a in zip(products, (a1, a2), strict=True):
            product[..., rows, rows] = (pair @ a[..., rows, :].unsqueeze(-1)).squeeze(-1)
            product[..., rows, :start] = (a[..., rows, :] * from_start) @ before.transpose(-1, -2)
    return products[0], products[1]


def _places(cu_seqlens: Tensor, lengths: list[int], first: list[int], size: int, device: torch.device) -> Tensor:
    """Where each token lies among the padded chunks."""
    shift = torch.tensor([f * size for f in first], device=device) - cu_seqlens[:-1]
    return torch.arange(sum(lengths), device=device) + torch.repeat_interleave(shift, cu_seqlens.diff())


def _normalise(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _read(state: Tensor, slots: Tensor) -> Tensor:
    return state[slots.clamp(min=0)].masked_fill((slots < 0)[:, None, None, None], 0)


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor
) -> None:
    tokens, heads, width = q.shape
    sequences = cu_seqlens.shape[0] - 1
    check_shape("k", k, tokens, heads, width)
    check_shape("v", v, tokens, heads, None)
    check_shape("g", g, tokens, heads, width)
    check_shape("beta", beta, tokens, heads)
    check_shape("state", state, None, heads, width, v.shape[-1])
    check_shape("read_slots", read_slots, sequences)
    check_shape("write_slots", write_slots, sequences)
    if state.dtype != torch.float32:
        raise ValueError(f"state: {state.dtype}, expected torch.float32")
    check_device(q, k=k, v=v, g=g, beta=beta, state=state, read_slots=read_slots, write_slots=write_slots, cu_seqlens=cu_seqlens)
