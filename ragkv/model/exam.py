"""The questions of the proof on load: five rows that read the same chunks as the engines do, and their slow reference.

Row 0 is Block-Attention's (chunks encoded alone, moved to where they stand), row 1 APE's with a temperature and a
weight, row 2 an expert of PCED, row 3 APE's other mode, row 4 Block-Attention's again with the chunks the other way
round. They share one step, so a chunk is read for several rows at once, at a distance and a weight of each row's own.
The reference is one dense attention over all tokens of a row, with explicit positions and masks; nothing in it
is turned, merged or read from a cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.row import Group, Row
from ragkv.types import Need

__all__ = ["CHUNKS", "PREFIX", "QUESTION", "Case", "Dense", "cases", "rows_of"]

PREFIX, CHUNKS, QUESTION = 5, (9, 7), 4
"""Tokens of the prefix, of the two chunks and of the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row's prompt: which chunks it reads (`starts`: chunk -> position of its first token), and how.

    `alone`: they were encoded without the prefix. `temperature`, `scale` and `mode` are the group's. `need` is what a
    model must bear to be asked it (None: every model must), `what` names it in a refusal.
    """

    what: str
    starts: dict[int, int]
    need: Need | None = None
    alone: bool = False
    temperature: float = 1.0
    scale: float = 1.0
    mode: str = "power"

    @property
    def ask(self) -> int:
        """Position of the question's first token."""
        return max(start + CHUNKS[chunk] for chunk, start in self.starts.items())


def cases(lacks: Collection[Need] = ()) -> tuple[Case, ...]:
    """The exam's rows, in the order of the step: those of engines that a model with these `lacks` may run."""
    together = {0: PREFIX, 1: PREFIX}
    rows = (
        Case(what="moved chunks", starts={0: PREFIX, 1: PREFIX + CHUNKS[0]}, alone=True, need=Need.MOVE),
        Case(what="a weighted group of chunks", starts=together, temperature=0.6, scale=0.5, need=Need.MERGE),
        Case(what="a chunk of its own", starts={1: PREFIX}),
        Case(
            what="a group weighted by its other mode",
            starts=together,
            temperature=0.6,
            scale=4.0,
            mode="log",
            need=Need.MERGE,
        ),
        Case(what="chunks in another order", starts={1: PREFIX, 0: PREFIX + CHUNKS[1]}, alone=True, need=Need.MOVE),
    )
    return tuple(case for case in rows if case.need not in lacks)


def rows_of(
    rows_asked: Sequence[Case], prefix: ChunkKV, alone: Sequence[ChunkKV], prefixed: Sequence[ChunkKV]
) -> list[Row]:
    """The exam's rows as engines make them: each sees the prefix, and a group of chunks."""
    rows = []
    for case in rows_asked:
        kvs = alone if case.alone else prefixed
        group = Group(
            segments=tuple(Segment(kv=kvs[chunk], start=start) for chunk, start in case.starts.items()),
            temperature=case.temperature,
            scale=case.scale,
            scale_mode="log" if case.mode == "log" else "power",
        )
        rows.append(Row((Group(segments=(Segment(kv=prefix, start=0),)), group), case.ask))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """The rows as whole sequences, padded on the right, and one dense attention over them.

    `ids` and `positions` `(rows, n)`; `visible` `(rows, n, n)`, windows not counted; `group` `(rows, n)`, the keys of
    the weighted group; `asking` `(rows, n)`, the queries for which it is one; `sharpness` 1/T, `power` and `factor`
    `(rows,)`: the group's sum Z of exp(s/T) enters the row as factor·Z^power. `asks` tells where each question begins.
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor
    group: Tensor
    asking: Tensor
    sharpness: Tensor
    power: Tensor
    factor: Tensor
    asks: tuple[int, ...]

    @classmethod
    def of(
        cls,
        rows: Sequence[Case],
        prefix: list[int],
        chunks: Sequence[list[int]],
        question: list[int],
        device: torch.device,
    ) -> Dense:
        """These rows over these token ids."""
        longest = PREFIX + sum(CHUNKS) + QUESTION
        ids = torch.full((len(rows), longest), prefix[0])
        positions = torch.arange(longest).repeat(len(rows), 1)
        visible = torch.eye(longest, dtype=torch.bool).repeat(len(rows), 1, 1)
        group, asking = (torch.zeros(len(rows), longest, dtype=torch.bool) for _ in range(2))
        asks = []
        for index, row in enumerate(rows):
            pieces = [(prefix, 0), *((chunks[c], start) for c, start in row.starts.items()), (question, row.ask)]
            at = 0
            for number, (tokens, start) in enumerate(pieces):
                end = at + len(tokens)
                ids[index, at:end] = torch.tensor(tokens)
                positions[index, at:end] = torch.arange(start, start + len(tokens))
                visible[index, at:end, at:end] = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
                last = number == len(pieces) - 1
                sees = at if last else 0 if row.alone else min(at, PREFIX)
                visible[index, at:end, :sees] = True
                if last:
                    group[index, PREFIX:at] = True
                    asking[index, at:end] = True
                    asks.append(at)
                at = end
        power = [r.temperature if r.mode == "log" else r.scale * r.temperature for r in rows]
        return cls(
            ids=ids.to(device),
            positions=positions.to(device),
            visible=visible.to(device),
            group=group.to(device),
            asking=asking.to(device),
            sharpness=torch.tensor([1 / r.temperature for r in rows], device=device),
            power=torch.tensor(power, device=device),
            factor=torch.tensor([r.scale if r.mode == "log" else 1.0 for r in rows], device=device),
            asks=tuple(asks),
        )

    def attend(
        self,
        _layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """One softmax per query over all keys of its row, in fp32 (APE Eq. 5 where the row has a weighted group)."""
        if self.ids.device != query.device:  # a layer of a model that is split
            return self._to(query.device).attend(
                _layer, query, key, value, scale=scale, softcap=softcap, window=window, sink=sink
            )
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1).float() for t in (key, value))
        scores = query.float() @ key.transpose(-1, -2) * scale  # (rows, q_heads, n, n)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = self.visible
        if window is not None:
            seen = seen & (self.positions[:, :, None] - self.positions[:, None, :] < window)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        weighed = (self.asking[:, :, None] & self.group[:, None, :])[:, None]  # (rows, 1, n, n)
        sharp = (scores * self.sharpness[:, None, None, None]).masked_fill(~weighed, -torch.inf)
        total = sharp.logsumexp(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        entering = sharp + (self.power[:, None, None, None] - 1) * total + self.factor.log()[:, None, None, None]
        scores = torch.where(weighed & seen[:, None], entering, scores)
        if sink is not None:
            scores = torch.cat([scores, sink.float()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1)[..., : key.shape[2]]
        return (weights @ value).to(query.dtype)

    def _to(self, device: torch.device) -> Dense:
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        there: dict[str, Any] = {name: t.to(device) for name, t in held.items() if isinstance(t, Tensor)}
        return replace(self, **there)
