import math

import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=512, layers=6, words=32000):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CausalSelfAttention(nn.Module):
    def __init__(s, w, h):
        super().__init__()
        s.h = h
        s.qkv = nn.Linear(w, 3 * w)
        s.out = nn.Linear(w, w)
        s.drop = nn.Dropout(0.1)

    def forward(s, x):
        b, t, c = x.shape
        q, k, v = s.qkv(x).split(c, dim=2)
        q, k, v = (y.view(b, t, s.h, c // s.h).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return s.drop(s.out(y.transpose(1, 2).contiguous().view(b, t, c)))


class GB(nn.Module):
    def __init__(s, w, h):
        super().__init__()
        s.n1 = nn.LayerNorm(w)
        s.a = CausalSelfAttention(w, h)
        s.n2 = nn.LayerNorm(w)
        s.m = nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w), nn.Dropout(0.1))

    def forward(s, x):
        x = x + s.a(s.n1(x))
        return x + s.m(s.n2(x))


class MiniGPT(nn.Module):
    def __init__(s, w=768, n=8, h=12, v=50304, t=2048):
        super().__init__()
        s.wte = nn.Embedding(v, w)
        s.wpe = nn.Embedding(t, w)
        s.drop = nn.Dropout(0.1)
        s.blocks = nn.ModuleList(GB(w, h) for _ in range(n))
        s.ln = nn.LayerNorm(w)
        s.head = nn.Linear(w, v, bias=False)
        s.head.weight = s.wte.weight

    def forward(s, ids):
        pos = torch.arange(ids.shape[1], device=ids.device)
        x = s.drop(s.wte(ids) + s.wpe(pos))
        for b in s.blocks:
            x = b(x)
        return s.head(s.ln(x))


class RMS(nn.Module):
    def __init__(s, w):
        super().__init__()
        s.weight = nn.Parameter(torch.ones(w))

    def forward(s, x):
        return s.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class LB(nn.Module):
    def __init__(s, w, h, kv):
        super().__init__()
        d = w // h
        s.h, s.kv, s.d = h, kv, d
        s.q = nn.Linear(w, w, bias=False)
        s.k = nn.Linear(w, kv * d, bias=False)
        s.v = nn.Linear(w, kv * d, bias=False)
        s.o = nn.Linear(w, w, bias=False)
        s.n1 = RMS(w)
        s.n2 = RMS(w)
        s.g = nn.Linear(w, 3 * w, bias=False)
        s.u = nn.Linear(w, 3 * w, bias=False)
        s.dn = nn.Linear(3 * w, w, bias=False)

    def rot(s, x, c, sn):
        a, b = x.chunk(2, dim=-1)
        return x * c + torch.cat((-b, a), dim=-1) * sn

    def forward(s, x, c, sn):
        b, t, _ = x.shape
        y = s.n1(x)
        q = s.q(y).view(b, t, s.h, s.d).transpose(1, 2)
        k = s.k(y).view(b, t, s.kv, s.d).transpose(1, 2)
        v = s.v(y).view(b, t, s.kv, s.d).transpose(1, 2)
        q = s.rot(q, c, sn)
        k = s.rot(k, c, sn)
        k = k.repeat_interleave(s.h // s.kv, dim=1)
        v = v.repeat_interleave(s.h // s.kv, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + s.o(y)
        y = s.n2(x)
        return x + s.dn(F.silu(s.g(y)) * s.u(y))


class MiniLlama(nn.Module):
    def __init__(s, w=1024, n=6, h=16, kv=4, v=32000):
        super().__init__()
        s.e = nn.Embedding(v, w)
        s.layers = nn.ModuleList(LB(w, h, kv) for _ in range(n))
        s.n = RMS(w)
        s.head = nn.Linear(w, v, bias=False)
        s.d = w // h
        s.register_buffer("inv", 1.0 / (10000 ** (torch.arange(0, s.d, 2).float() / s.d)), persistent=False)

    def forward(s, ids):
        x = s.e(ids)
        t = torch.arange(ids.shape[1], device=ids.device).float()
        f = torch.outer(t, s.inv.float())
        e = torch.cat((f, f), -1)
        c, sn = e.cos().to(x.dtype), e.sin().to(x.dtype)
        for l in s.layers:
            x = l(x, c, sn)
        return s.head(s.n(x))


class EB(nn.Module):
    def __init__(s, w, h):
        super().__init__()
        s.h = h
        s.q = nn.Linear(w, w)
        s.k = nn.Linear(w, w)
        s.v = nn.Linear(w, w)
        s.o = nn.Linear(w, w)
        s.n1 = nn.LayerNorm(w)
        s.n2 = nn.LayerNorm(w)
        s.i = nn.Linear(w, 4 * w)
        s.f = nn.Linear(4 * w, w)
        s.d = nn.Dropout(0.1)

    def forward(s, x):
        b, t, w = x.shape
        sp = lambda y: y.view(b, t, s.h, w // s.h).permute(0, 2, 1, 3)
        q, k, v = sp(s.q(x)), sp(s.k(x)), sp(s.v(x))
        a = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(w // s.h)
        a = s.d(F.softmax(a, dim=-1))
        y = torch.matmul(a, v).permute(0, 2, 1, 3).reshape(b, t, w)
        x = s.n1(x + s.d(s.o(y)))
        return s.n2(x + s.d(s.f(F.gelu(s.i(x)))))


class EagerEncoder(nn.Module):
    def __init__(s, w=512, n=4, h=8, v=30000, c=5):
        super().__init__()
        s.e = nn.Embedding(v, w)
        s.layers = nn.ModuleList(EB(w, h) for _ in range(n))
        s.c = nn.Linear(w, c)

    def forward(s, ids):
        x = s.e(ids)
        for l in s.layers:
            x = l(x)
        return s.c(torch.tanh(x.mean(dim=1)))


class Torchs(nn.Module):
    def __init__(s, w=512, n=4, v=20000):
        super().__init__()
        s.e = nn.Embedding(v, w)
        s.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(w, 8, 2048, batch_first=True), n)
        s.c = nn.Linear(w, v)

    def forward(s, ids):
        return s.c(s.t(s.e(ids)))


class RB(nn.Module):
    def __init__(s, i, o, st=1):
        super().__init__()
        s.c1 = nn.Conv2d(i, o, 3, st, 1, bias=False)
        s.b1 = nn.BatchNorm2d(o)
        s.c2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        s.b2 = nn.BatchNorm2d(o)
        s.r = nn.ReLU(inplace=True)
        s.d = (
            nn.Sequential(nn.Conv2d(i, o, 1, st, bias=False), nn.BatchNorm2d(o)) if st > 1 or i != o else nn.Identity()
        )

    def forward(s, x):
        y = s.r(s.b1(s.c1(x)))
        y = s.b2(s.c2(y))
        y += s.d(x)
        return s.r(y)


class Res(nn.Module):
    def __init__(s, c=64, k=100):
        super().__init__()
        s.stem = nn.Sequential(
            nn.Conv2d(3, c, 7, 2, 3, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        s.l1 = nn.Sequential(RB(c, c), RB(c, c))
        s.l2 = nn.Sequential(RB(c, 2 * c, 2), RB(2 * c, 2 * c))
        s.l3 = nn.Sequential(RB(2 * c, 4 * c, 2), RB(4 * c, 4 * c))
        s.pool = nn.AdaptiveAvgPool2d(1)
        s.fc = nn.Linear(4 * c, k)

    def forward(s, x):
        return s.fc(torch.flatten(s.pool(s.l3(s.l2(s.l1(s.stem(x))))), 1))


class MoE(nn.Module):
    def __init__(s, w=512, e=8, v=16000, n=3):
        super().__init__()
        s.em = nn.Embedding(v, w)
        s.g = nn.ModuleList(nn.Linear(w, e) for _ in range(n))
        s.w1 = nn.ParameterList(nn.Parameter(torch.randn(e, w, 2 * w)) for _ in range(n))
        s.w2 = nn.ParameterList(nn.Parameter(torch.randn(e, 2 * w, w)) for _ in range(n))
        s.h = nn.Linear(w, v)
        s.n = n

    def forward(s, ids):
        x = s.em(ids)
        for i in range(s.n):
            p = s.g[i](x).softmax(-1)
            y = torch.einsum("btw,ewf->btef", x, s.w1[i])
            y = F.silu(y)
            y = torch.einsum("btef,efw->btew", y, s.w2[i])
            x = x + (y * p.unsqueeze(-1)).sum(2)
        return s.h(x)


class Gated(nn.Module):
    def __init__(s, w=384, n=5, v=10000):
        super().__init__()
        s.e = nn.Embedding(v, w)
        s.l = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    n=nn.RMSNorm(w),
                    a=nn.Linear(w, 4 * w),
                    b=nn.Linear(2 * w, w),
                    c=nn.Conv1d(w, w, 3, padding=1, groups=w),
                )
            )
            for _ in range(n)
        )
        s.h = nn.Linear(w, v)

    def forward(s, ids):
        x = s.e(ids)
        for m in s.l:
            y = m["n"](x)
            y = m["c"](y.transpose(1, 2)).transpose(1, 2)
            u, g = m["a"](y).chunk(2, -1)
            x = x + F.dropout(m["b"](u * torch.sigmoid(g)), 0.1, s.training)
        return s.h(x)


SPEC = {
    "Net": "ids",
    "MiniGPT": "ids",
    "MiniLlama": "ids",
    "EagerEncoder": "ids",
    "Torchs": "ids",
    "Res": "x",
    "MoE": "ids",
    "Gated": "ids",
}
INPUT = {"ids": "ids=int64[batch,seq]", "x": "x=float[batch,3,height,width]"}
