"""Slow literal references from the papers' equations: whole sequences, dense masks, transformers' forward pass.

They use nothing of ragkv's engines or attention. Each engine has a function that decodes greedily and returns (token
ids, winners or None); every step's scores `(vocab,)` are appended to `trace`.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

Ids = list[int]
NAME = "ragkv-oracle"


def full(model, prefix, chunks, suffix, steps, *, trace=None):
    """One causal sequence."""
    tokens = [*prefix, *(i for chunk in chunks for i in chunk), *suffix]
    out: Ids = []
    for _ in range(steps):
        logits = model(input_ids=torch.tensor([tokens + out]), use_cache=False).logits[0, -1]
        _note(trace, logits)
        out.append(int(logits.argmax()))
    return out


def block(model, prefix, chunks, suffix, steps, *, weights=None, trace=None, **settings):
    """Block placement: `reading` with these settings; `weights` receives every layer's attention of the first step."""
    out: Ids = []
    for _ in range(steps):
        logits = reading(model, prefix, chunks, [*suffix, *out], weights=None if out else weights, **settings)[-1]
        _note(trace, logits)
        out.append(int(logits.argmax()))
    return out


def reading(
    model: Any,
    prefix: Ids,
    chunks: list[Ids],
    own: Ids,
    *,
    over: str = "standalone",
    reencode: bool = True,
    fresh: Ids | tuple[()] = (),
    weights: dict[int, Tensor] | None = None,
) -> Tensor:
    """Logits `(n, vocab)` of `own` tokens after blocks, in one dense sequence.

    The stored prompt comes first: every block sees only itself (Block-Attention Figure 1), and for "prefixed" KV also a
    copy of the prefix right before it, at the position at which the chunk was encoded. The tokens at positions `fresh`
    follow again (Blend), then `own`. These see, at each earlier position, the fresh token if there is one, otherwise
    the stored one, and no copies. Without `reencode` every block has positions from 0 (the ablation "w/o-pos").
    `weights` receives every layer's attention, of the prompt's tokens without the copies.
    """
    model.set_attn_implementation(NAME)
    blocks = [part for part in [prefix, *chunks] if part]
    stored = [i for part in blocks for i in part]
    owner = [number for number, part in enumerate(blocks) for _ in part]
    copies = [number for number in range(1, len(blocks)) if over == "prefixed" and prefix]
    starts = [sum(map(len, blocks[:number])) for number in copies]
    before = [start - len(prefix) + i for start in starts for i in range(len(prefix))]
    owners = torch.tensor(owner + [number for number in copies for _ in prefix])
    n, m = len(stored), len(stored) + len(before)
    tokens = [*stored, *prefix * len(copies), *(stored[place] for place in fresh), *own]
    places = range(n) if reencode else [i for part in blocks for i in range(len(part))]
    at = torch.tensor([*places, *before, *fresh, *range(n, n + len(own))])
    visible = at[:, None] >= at
    visible[:m, :m] &= owners[:, None] == owners
    visible[:m, m:] = False
    visible[m:, n:m] = False
    visible[m:, :n] &= ~torch.isin(torch.arange(n), torch.tensor(fresh, dtype=torch.long))
    seen: dict[int, Tensor] = {}
    nothing = torch.zeros(len(at), dtype=torch.bool)  # no group weights
    plan = {"visible": visible, "behind": at[:, None] - at, "context": nothing, "first": len(at)}
    plan |= {"T": 1.0, "S": 1.0, "factor": 1.0, "weights": seen}
    ids = torch.tensor([tokens])
    logits = model(ids, position_ids=at[None], use_cache=False, oracle=plan).logits[0, len(tokens) - len(own) :]
    if weights is not None:
        kept = [*range(n), *range(m, len(tokens))]
        weights |= {layer: each[:, kept][:, :, kept] for layer, each in seen.items()}
    return logits.detach().float()


def stacked(model, prefix, asked, lengths):
    """All questions `(context, question)` in one prompt, whose answers of these lengths are appended token by token
    (IPPD §4.1): every token has a virtual position, a context and a question; 0 is what all see. Returns ids and
    scores of each answer.
    """
    tokens = list(prefix)
    marks = [(at, 0, 0) for at in range(len(prefix))]
    places: dict[tuple[int, ...], int] = {}
    ends, homes = [], []

    def append(ids, at, home, number):
        tokens.extend(ids)
        marks.extend((at + i, home, number) for i in range(len(ids)))

    for number, (context, question) in enumerate(asked, 1):
        home = places.setdefault(tuple(context), len(places) + 1)
        if home not in homes:
            append(context, len(prefix), home, 0)
        append(question, len(prefix) + len(context), home, number)
        homes.append(home)
        ends.append(len(prefix) + len(context) + len(question))
    answers: list[Ids] = [[] for _ in asked]
    scores: list[list[Tensor]] = [[] for _ in asked]
    model.set_attn_implementation(NAME)
    for step in range(max(lengths)):
        at, home, owner = torch.tensor(marks).T
        visible = at[:, None] >= at
        visible &= (home[:, None] == home) | (home == 0)
        visible &= (owner[:, None] == owner) | (owner == 0)
        plan = {"visible": visible, "behind": at[:, None] - at, "context": torch.zeros(len(at), dtype=torch.bool)}
        plan |= {"first": len(at), "T": 1.0, "S": 1.0, "factor": 1.0, "weights": {}}
        logits = model(torch.tensor([tokens]), position_ids=at[None], use_cache=False, oracle=plan).logits[0].float()
        for number in range(len(asked)):
            if step < lengths[number]:
                last = max(i for i, mark in enumerate(marks) if mark[2] == number + 1)
                scores[number].append(logits[last].detach())
                answers[number].append(int(logits[last].argmax()))
        for number in range(len(asked)):
            if step < lengths[number]:
                append(answers[number][-1:], ends[number] + step, homes[number], number + 1)
    return answers, scores


def pced(model, prefix, chunks, suffix, scores, steps, *, gamma=2.5, beta="per_expert", rule="max", trace=None):
    """PCED Eqs. 2-3 with N+1 separate plain forward passes; β by AdaCAD at the first token, constant after it.

    `released` uses AdaCAD's divergence without the sum; `moe` and `poe` are Table 7's rules over softmax(β-contrasted).
    """
    strengths: list[Any] = []
    out: Ids = []
    winners: list[int] = []
    for _ in range(steps):
        streams = [[*prefix, *suffix, *out], *([*prefix, *chunk, *suffix, *out] for chunk in chunks)]
        logits = [model(input_ids=torch.tensor([s]), use_cache=False).logits[0, -1].float() for s in streams]
        if not strengths:
            strengths = [_jsd(logits[0], expert) for expert in logits[1:]]
            if beta == "released":
                strengths = [s.clamp(0, 1).float() for s in strengths]
            else:
                strengths = [float(s.sum()) for s in strengths]
            if beta == "shared":
                strengths = [sum(strengths) / len(strengths)] * len(strengths)
            elif isinstance(beta, float):
                strengths = [beta] * len(strengths)
        rows = [(1 + b) * expert - b * logits[0] for expert, b in zip(logits[1:], strengths, strict=True)]
        prior = [gamma * math.log(max(r, 1e-12)) for r in scores]
        if rule == "max":
            best = torch.stack([row + p for row, p in zip(rows, prior, strict=True)])
            _note(trace, best.max(0).values)
            token = int(best.max(0).values.argmax())
        else:
            weights = torch.tensor([math.exp(p) for p in prior], dtype=torch.double)
            weights = (weights / weights.sum())[:, None]
            chances = torch.softmax(torch.stack(rows).double(), -1)
            best = weights * chances
            joint = best.sum(0) if rule == "moe" else (chances**weights).prod(0)
            _note(trace, joint.log())
            token = int(joint.argmax())
        winners.append(int(best[:, token].argmax()))
        out.append(token)
    return out, winners


def _jsd(a, b):
    """The divergence's terms, one per token; their sum is the divergence."""
    p, q = torch.softmax(a.double(), -1), torch.softmax(b.double(), -1)
    m = (p + q) / 2
    return 0.5 * (p * (p / m).log() + q * (q / m).log())


def ape(model, prefix, chunks, suffix, steps, *, temperature, scale, mode="power", trace=None):
    """APE Eq. 5 with dense masks and reused positions; the exponent is S·T, as in the search of §4.4.

    In `log` mode the context's sum Z enters as S·Z^T.
    """
    model.set_attn_implementation(NAME)
    longest = max((len(chunk) for chunk in chunks), default=0)
    out: Ids = []
    for _ in range(steps):
        own = [*suffix, *out]
        tokens = [*prefix, *(i for chunk in chunks for i in chunk), *own]
        at = len(prefix)
        positions = [*range(at), *(at + i for chunk in chunks for i in range(len(chunk)))]
        positions += [at + longest + i for i in range(len(own))]
        visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        start = at
        for chunk in chunks:
            visible[start : start + len(chunk), at:start] = False
            start += len(chunk)
        context = torch.zeros(len(tokens), dtype=torch.bool)
        context[at:start] = True
        at_positions = torch.tensor(positions)
        plan = {
            "visible": visible,
            "behind": at_positions[:, None] - at_positions,
            "context": context,
            "first": start,
            "T": temperature,
            "S": scale * temperature if mode == "power" else temperature,
            "factor": 1.0 if mode == "power" else scale,
        }
        logits = model(
            input_ids=torch.tensor([tokens]), position_ids=at_positions[None], use_cache=False, oracle=plan
        ).logits[0, -1]
        _note(trace, logits)
        out.append(int(logits.argmax()))
    return out


def attention(query, key, value, scale, *, softcap=None, causal=False):
    """`(out, logsumexp)` in float64; several query heads share a key head."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(group, 1) for each in (key, value))
    scores = query.double() @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _note(trace, scores):
    if trace is not None:
        trace.append(scores.detach().float())


def _dense(module, query, key, value, mask, *, scaling, oracle, **rest):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
    scores = query.double() @ key.transpose(-1, -2) * scaling
    if (cap := rest.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    visible = oracle["visible"]
    if mask.window is not None:
        visible = visible & (oracle["behind"] < mask.window)
    weights = scores.exp() * visible
    # Eq. 5, for the rows from the question on: a' = exp(s / T), and its sum to the power S
    first, context = oracle["first"], oracle["context"]
    sharp = (scores[:, :, first:] / oracle["T"]).exp() * (context & visible[first:])
    total = sharp.sum(-1, keepdim=True)
    share = sharp * total.clamp_min(1e-300) ** (oracle["S"] - 1) * oracle["factor"]
    rescaled = torch.where(total > 0, share, 0.0)
    weights[:, :, first:] = torch.where(context, rescaled, weights[:, :, first:])
    whole = weights.sum(-1, keepdim=True)
    if (sink := rest.get("s_aux")) is not None:  # an additional score beside those of the keys
        whole = whole + sink.double().exp()[:, None, None]
    weights = weights / whole
    if oracle.get("weights") is not None:
        oracle["weights"][module.layer_idx] = weights[0]
    out = weights @ value
    return out.to(query.dtype).transpose(1, 2), None


AttentionInterface.register(NAME, _dense)
# the window of the layer's mask: not every family passes it in the attention call as well
AttentionMaskInterface.register(NAME, lambda local_size=None, **_: SimpleNamespace(window=local_size))
