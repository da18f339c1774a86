"""APB as its definition: one dense pass over [prefix, anchor, document, question] with a mask for each kv head.

Nothing is cached, cut or merged: the tests of `ragkv.model.apb` compare with it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Score = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]
"""(layer, query, key, value of some tokens `(heads, n, head_dim)`, position of the first) -> `(kv_heads, n)`."""


class DenseBook:
    """What attends: tokens of kind 0 prefix, 1 anchor, 2 + h block h, and -1 the question after the document."""

    def __init__(self, prefix, anchor, head, blocks, question, passing, score):
        tokens = sum(blocks)
        kinds = [0] * prefix + [1] * anchor + [2 + h for h, n in enumerate(blocks) for _ in range(n)]
        self.kind = torch.tensor(kinds + [-1] * question)
        document = range(prefix, prefix + tokens + question)
        self.position = torch.tensor([*range(prefix), *range(prefix, prefix + anchor), *document])
        self.head, self.passing, self.score = head, passing, score

    def attend(self, call):
        query, key, value = call.query, call.key, call.value
        kind, place = self.kind, self.position
        heads, n = key.shape[1], len(kind)
        order = torch.arange(n)
        passed = self._passed(call.layer, query[0], key[0], value[0])
        visible = torch.zeros(heads, n, n, dtype=torch.bool)
        for at in range(n):
            sees = (order <= at) & (kind == kind[at])
            if kind[at] == -1:
                sees |= (kind == 0) | (kind >= 2)
            elif kind[at] >= 1:
                sees |= kind == 0
            if kind[at] > 2:
                sees |= kind == 1
            visible[:, at] = sees
            if kind[at] > 2:
                visible[:, at] |= passed & (kind >= 2) & (kind < kind[at])
        if call.window is not None:
            visible &= place[:, None] - place < call.window
        groups = query.shape[1] // heads
        keys, values = key.repeat_interleave(groups, 1).float(), value.repeat_interleave(groups, 1).float()
        scores = query.float() @ keys.transpose(-1, -2) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.masked_fill(~visible.repeat_interleave(groups, 0), -torch.inf)
        if call.sink is not None:
            scores = torch.cat([scores, call.sink.float()[None, :, None, None].expand(1, -1, n, 1)], -1)
        return (scores.softmax(-1)[..., :n] @ values).to(query.dtype)

    def _passed(self, layer, query, key, value):
        """`(kv_heads, n)`: which tokens their block passes on."""
        found = torch.zeros(key.shape[0], len(self.kind), dtype=torch.bool)
        for block in range(2, int(self.kind.max()) + 1):
            tokens = (self.kind == block).nonzero()[:, 0]
            tokens = tokens[self.head :] if block == 2 else tokens
            if not len(tokens) or not self.passing:
                continue
            first = int(self.position[tokens[0]])
            scores = self.score(layer, query[:, tokens], key[:, tokens], value[:, tokens], first)
            for head, of_head in enumerate(scores):
                best = sorted(range(len(tokens)), key=lambda i: (-float(of_head[i]), i))[: self.passing]
                found[head, tokens[best]] = True
        return found


def dense_logits(model, dense, ids, question):
    """fp32 logits `(question, vocab)` of the question's tokens; `ids` are all tokens in the order of `dense`."""
    logits: Tensor = model.whole(torch.tensor([ids]), dense.position[None], dense)[0]
    return logits[-question:]
