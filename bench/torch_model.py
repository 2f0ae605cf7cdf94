"""The same architecture in eager PyTorch on a CPU, to compare speed with. Not part of the product.

Written as one writes eager PyTorch: whole-batch tensor operations, a preallocated cache, one matrix
product per live expert, no compilation. It shares weights and rope frequencies with the model and
no other code; `bench.engine` checks its logits against the model's before it times anything.
PyTorch is no dependency of the project: `pip install torch==2.13.0`.

It holds B sequences of equal length (the cache is written for all of them at one position),
float32, numerics profile `plain`.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
import torch.nn.functional as F

from ds4jax.config import ModelConfig
from ds4jax.params import Params
from pallas_kernels import rope

Tensor = torch.Tensor


class State:
    """Cache of one layer for B sequences of up to `capacity` tokens."""

    def __init__(self, cfg: ModelConfig, ratio: int, batch: int, capacity: int) -> None:
        d, j = cfg.head_dim, cfg.index_head_dim
        self.kv = torch.zeros(batch, capacity, d)
        wide = 2 if ratio == 4 else 1
        rows = capacity // ratio if ratio else 0
        self.comp = torch.zeros(batch, rows, d)
        self.index = torch.zeros(batch, rows if ratio == 4 else 0, j)
        # Compressor inputs: enough past positions for the windows of a group.
        self.parts = torch.zeros(batch, capacity if ratio else 0, 2, wide * d)
        self.iparts = torch.zeros(batch, capacity if ratio == 4 else 0, 2, 2 * j)


class TorchModel:
    """The model with its weights as tensors (shared with JAX's arrays where they are plain)."""

    def __init__(self, cfg: ModelConfig, params: Params) -> None:
        self.cfg = cfg
        self.top = {k: _tensor(v) for k, v in params.top.items()}
        self.layers = [
            {k: _tensor(v)[r] for k, v in unit.items()}
            for group, units in zip(params.layout, params.groups, strict=True)
            for r in range(group.count)
            for unit in units
        ]
        main = rope.inverse_frequencies(cfg.rope_head_dim, cfg.rope_theta)
        compress = rope.yarn_frequencies(
            cfg.rope_head_dim, cfg.compress_rope_theta, factor=cfg.rope_scaling_factor,
            original_len=cfg.rope_original_len, beta_fast=cfg.rope_beta_fast,
            beta_slow=cfg.rope_beta_slow,
        )  # fmt: skip
        self.freqs = [torch.from_numpy(main), torch.from_numpy(compress)]
        self.angles: list[tuple[Tensor, Tensor]] = []
        self.states: list[State] = []
        self.length = 0

    def start(self, batch: int, capacity: int) -> None:
        """Forget everything; make room for `batch` sequences of `capacity` tokens."""
        self.states = [State(self.cfg, r, batch, capacity) for r in self.cfg.compress_ratios]
        at = torch.arange(capacity, dtype=torch.float64)[:, None]
        self.angles = [((at * f).cos().float(), (at * f).sin().float()) for f in self.freqs]
        self.length = 0

    def copy_lane(self, batch: int) -> None:
        """Turn a state of one sequence into one of `batch` equal sequences."""
        for s in self.states:
            for name in ("kv", "comp", "index", "parts", "iparts"):
                a = getattr(s, name)[:1]
                setattr(s, name, a.expand(batch, *a.shape[1:]).contiguous())

    @torch.inference_mode()
    def forward(self, tokens: Tensor, *, last_only: bool = True) -> Tensor:
        """Feed tokens [B, T] at the next positions; logits [B, V], or [B, T, V] of every row."""
        x = F.embedding(tokens, self.top["embed"])
        x = x[:, :, None].expand(-1, -1, self.cfg.hc_mult, -1)
        pos = torch.arange(self.length, self.length + tokens.shape[1])
        for i, w in enumerate(self.layers):
            x = self._layer(i, w, x, tokens, pos)
        self.length += tokens.shape[1]
        if last_only:
            x = x[:, -1:]
        pre, _ = self._mix(x, self.top["hc_head_fn"])
        pre = torch.sigmoid(pre * self.top["hc_head_scale"] + self.top["hc_head_base"])
        pre = pre + self.cfg.hc_eps
        h = self._norm((x * pre[..., None]).sum(-2), self.top["norm"])
        logits = F.linear(h, self.top["head"])
        return logits[:, -1] if last_only else logits

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.cfg.rms_norm_eps)

    def _mix(self, x: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(*x.shape[:2], -1)
        scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.cfg.rms_norm_eps)
        return F.linear(flat, fn) * scale, scale

    def _read(self, x: Tensor, w: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.cfg.hc_mult, self.cfg.hc_eps
        m, _ = self._mix(x, w[f"hc_{name}_fn"])
        scale, base = w[f"hc_{name}_scale"], w[f"hc_{name}_base"]
        pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
        post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        c = (m[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(*m.shape[:2], n, n)
        c = torch.softmax(c, -1) + eps
        c = c / (c.sum(-2, keepdim=True) + eps)
        for _ in range(self.cfg.hc_sinkhorn_iters - 1):
            c = c / (c.sum(-1, keepdim=True) + eps)
            c = c / (c.sum(-2, keepdim=True) + eps)
        return (x * pre[..., None]).sum(-2), post, c

    def _write(self, x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return post[..., None] * y[..., None, :] + comb.transpose(-1, -2) @ x

    def _layer(
        self, i: int, w: dict[str, Tensor], x: Tensor, tokens: Tensor, pos: Tensor
    ) -> Tensor:
        h, post, comb = self._read(x, w, "attn")
        y = self._attention(i, w, self._norm(h, w["attn_norm"]), pos)
        x = self._write(x, y, post, comb)
        h, post, comb = self._read(x, w, "ffn")
        y = self._experts(i, w, self._norm(h, w["ffn_norm"]), tokens)
        return self._write(x, y, post, comb)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, ..., D], angles [T, R/2]; the trailing channels are rotated in pairs."""
        r = self.cfg.rope_head_dim
        shape = (1, cos.shape[0], *([1] * (x.ndim - 3)), r // 2)
        cos, sin = cos.view(shape), sin.view(shape)
        a, b = x[..., -r::2], x[..., 1 - r :: 2]
        out = x.clone()
        out[..., -r::2] = a * cos - b * sin
        out[..., 1 - r :: 2] = a * sin + b * cos
        return out

    def _attention(self, i: int, w: dict[str, Tensor], x: Tensor, pos: Tensor) -> Tensor:
        cfg, state, ratio = self.cfg, self.states[i], self.cfg.compress_ratios[i]
        b, t, _ = x.shape
        start, stop = self.length, self.length + t
        cos, sin = self.angles[1 if ratio else 0]
        cos_t, sin_t = cos[start:stop], sin[start:stop]
        qr = self._norm(F.linear(x, w["attn.wq_a"]), w["attn.q_norm"])
        q = F.linear(qr, w["attn.wq_b"]).view(b, t, cfg.num_heads, cfg.head_dim)
        q = self._rotate(self._norm(q, None), cos_t, sin_t)
        kv = self._norm(F.linear(x, w["attn.wkv"]), w["attn.kv_norm"])
        state.kv[:, start:stop] = self._rotate(kv, cos_t, sin_t)
        first = max(0, start - cfg.sliding_window + 1)
        keys = state.kv[:, first:stop]
        at = torch.arange(first, stop)
        mask = (at <= pos[:, None]) & (at > pos[:, None] - cfg.sliding_window)
        mask = mask.expand(b, t, -1)
        if ratio:
            self._compress(i, w, x, "attn.compressor", state.parts, state.comp)
            rows = stop // ratio
            seen = torch.arange(rows) < ((pos + 1) // ratio)[:, None]
            seen = seen.expand(b, t, rows)
            if ratio == 4:
                seen = self._select(w, x, qr, state, seen, i, cos_t, sin_t)
            keys = torch.cat([state.comp[:, :rows], keys], 1)
            mask = torch.cat([seen, mask], 2)
        scores = torch.einsum("bthd,bsd->bths", q, keys) * cfg.head_dim**-0.5
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
        sink = w["attn.attn_sink"].view(1, 1, -1, 1).expand(b, t, -1, 1)
        weight = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        o = self._rotate(torch.einsum("bths,bsd->bthd", weight, keys), cos_t, -sin_t)
        groups = w["attn.wo_a"].view(cfg.o_groups, cfg.o_lora_rank, -1)
        z = torch.einsum("btgi,goi->btgo", o.reshape(b, t, cfg.o_groups, -1), groups)
        return F.linear(z.reshape(b, t, -1), w["attn.wo_b"])

    def _compress(
        self, i: int, w: dict[str, Tensor], x: Tensor, name: str, parts: Tensor, out: Tensor
    ) -> None:
        """Store the compressor's inputs of these rows and the rows that they complete."""
        ratio = self.cfg.compress_ratios[i]
        b, t, _ = x.shape
        start, stop = self.length, self.length + t
        ape = w[f"{name}.ape"]
        parts[:, start:stop, 0] = F.linear(x, w[f"{name}.wkv"])
        gate = F.linear(x, w[f"{name}.wgate"]) + ape[torch.arange(start, stop) % ratio]
        parts[:, start:stop, 1] = gate
        low, high = start // ratio, stop // ratio
        if high == low:
            return
        new = parts[:, low * ratio : high * ratio].view(b, high - low, ratio, 2, -1)
        if ratio == 4:  # the older window gives the leading channels, the newer one the trailing
            half = new.shape[-1] // 2
            old = parts[:, max(low - 1, 0) * ratio : (high - 1) * ratio]
            old = old.view(b, -1, ratio, 2, 2 * half)[..., :half]
            if low == 0:
                gone = torch.zeros_like(new[:, :1, ..., :half])
                gone[:, :, :, 1] = float("-inf")
                old = torch.cat([gone, old], 1)
            new = torch.cat([old, new[..., half:]], 2)
        weight = torch.softmax(new[..., 1, :], 2)
        row = self._norm((weight * new[..., 0, :]).sum(2), w[f"{name}.norm"])
        cos, sin = self.angles[1]
        out[:, low:high] = self._rotate(
            row, cos[low * ratio : high * ratio : ratio], sin[low * ratio : high * ratio : ratio]
        )

    def _select(
        self, w: dict[str, Tensor], x: Tensor, qr: Tensor, state: State, seen: Tensor, i: int,
        cos: Tensor, sin: Tensor,
    ) -> Tensor:  # fmt: skip
        """Which compressed rows each row attends to: the best `index_topk` of those it may see."""
        cfg = self.cfg
        self._compress(i, w, x, "attn.indexer.compressor", state.iparts, state.index)
        rows = seen.shape[-1]
        if rows <= cfg.index_topk:
            return seen
        b, t, _ = x.shape
        q = F.linear(qr, w["attn.indexer.wq_b"]).view(b, t, cfg.index_num_heads, -1)
        q = self._rotate(q, cos, sin)
        scale = cfg.index_head_dim**-0.5 * cfg.index_num_heads**-0.5
        head = F.linear(x, w["attn.indexer.weights_proj"]) * scale
        scores = torch.einsum("bthd,bsd->bths", q, state.index[:, :rows])
        scores = torch.einsum("bths,bth->bts", scores.relu_(), head)
        scores = scores.masked_fill(~seen, float("-inf"))
        best = scores.topk(cfg.index_topk, -1).indices
        return torch.zeros_like(seen).scatter_(2, best, True) & seen

    def _experts(self, i: int, w: dict[str, Tensor], x: Tensor, tokens: Tensor) -> Tensor:
        cfg = self.cfg
        flat = x.reshape(-1, x.shape[-1])
        score = F.softplus(F.linear(flat, w["ffn.gate"])).sqrt()
        if cfg.is_hash_layer(i):
            ids = w["ffn.gate.tid2eid"][tokens.reshape(-1)][:, : cfg.num_experts_per_tok].long()
        else:
            ids = (score + w["ffn.gate.bias"]).topk(cfg.num_experts_per_tok, -1).indices
        weight = score.gather(1, ids)
        if cfg.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = weight * cfg.routed_scaling_factor
        y = _swiglu(
            flat, w["ffn.shared_experts.w1"], w["ffn.shared_experts.w3"],
            w["ffn.shared_experts.w2"], cfg.shared_swiglu_limits[i],
        )  # fmt: skip
        w1, w3, w2 = (w[f"ffn.experts.{k}"] for k in ("w1", "w3", "w2"))
        limit = cfg.swiglu_limits[i]
        if flat.shape[0] == 1:
            for e, factor in zip(ids[0].tolist(), weight[0], strict=True):
                y += _swiglu(flat, w1[e], w3[e], w2[e], limit, factor)
        else:
            for e in ids.unique().tolist():
                row, k = (ids == e).nonzero(as_tuple=True)
                out = _swiglu(flat[row], w1[e], w3[e], w2[e], limit, weight[row, k, None])
                y.index_add_(0, row, out)
        return y.view_as(x)


def _swiglu(
    x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float, factor: Any = None
) -> Tensor:
    gate = F.linear(x, w1).clamp_(max=limit)
    up = F.linear(x, w3).clamp_(-limit, limit)
    h = F.silu(gate) * up
    return F.linear(h if factor is None else h * factor, w2)


def _tensor(a: Any) -> Tensor:
    if not isinstance(a, jax.Array):
        raise ValueError("the PyTorch model takes plain weights only: use decoded ones")
    return torch.from_dlpack(a)
