"""The proof on load (docs/design.md): what ragkv computes is what transformers computes, or the model is refused.

A silently wrong answer is the failure that users of KV reuse meet most. The proof is a handful of forward passes over
some 25 tokens, and it has to see what it vouches for. Two things would hide at that length:

- Windows. They are thousands of tokens long, so the passes run on a twin of the model (`ragkv.model.twin`): the same
  weights under a copied configuration whose windows are shrunk to a few tokens. transformers' own pass runs on such
  a twin too, and makes its own masks for it. A random miniature of the same family would be cheaper for a large
  model, but it would need sizes that fit each other for every family, and it would prove other weights.
- What a mask does far from the diagonal. transformers' own mask function is asked at such distances directly.

Rows with offsets, weights and lengths of their own are in `ragkv.model.exam`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.attention.rope import Rotary
from ragkv.attention.row import Row
from ragkv.attention.slab import Slabs
from ragkv.attention.visibility import Visible, require_rule
from ragkv.errors import ModelLoadError, RagkvError, UnsupportedModelError
from ragkv.model.exam import CHUNKS, PREFIX, QUESTION, Dense, cases, rows_of
from ragkv.model.interface import Seen
from ragkv.model.rotary import without_rotary
from ragkv.types import Need

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["check_model", "tolerance"]

_SHIFT = 11
_NOT_LIKE_THIS = (TypeError, RuntimeError, ValueError, LookupError, AttributeError)
"""What a rotary function raises that is meant to be called otherwise."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_STEP = 3  # the last tokens of the causal pass come in a step of their own, over what the row has cached
_LENGTHS, _FAR, _FURTHEST = 1e-4, 0.03, 1 << 15
_WINDOW = 8  # shrunk to: it ends inside the second chunk, for the question of every row


def tolerance(dtype: torch.dtype) -> float:
    """Largest accepted ‖a − b‖ / ‖b‖; a wrong layout gives about 1.

    The half types differ by rounding between any two correct kernels: up to 0.045 on random 9-layer models.
    """
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.1


def check_model(model: LanguageModel) -> None:
    """Refuse a model whose keys or logits are not what its own implementation gives.

    (1) Every layer attends once, under a mask that is causal or a causal window; `model.windows` is what was found.
    (2) Keys of the same tokens at shifted positions are R(shift)·keys, layer by layer; a layer whose keys do
    not move has no RoPE, and its queries are never turned. (3) A causal pass, its end in a step of its own, equals
    transformers'. (4) The exam's rows equal a dense reference. What fails only where chunks are moved or merged
    is in `model.lacks`, and the engines that need it are refused; anything else refuses the model.
    Raises UnsupportedModelError with the model's name and family, whatever goes wrong in it; ModelLoadError when
    the memory does not suffice.
    """
    try:
        _prove(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{_name(model)} is not supported: {str(error).rstrip('.')}.") from error
    except RagkvError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelLoadError(f"{_name(model)} does not fit into memory; load it on a larger device.") from error
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        what = "it computes with its attention masks" if "Visible" in reason else "ragkv cannot run its attention"
        raise UnsupportedModelError(
            f"{_name(model)} is not supported: {what} ({type(error).__name__}: {reason})."
        ) from error


def _prove(model: LanguageModel) -> None:
    model.lacks, model.moves_within, model.shared = {}, None, {}
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size, 1000)
    ids = torch.randint(3, vocabulary, (PREFIX + sum(CHUNKS) + QUESTION,), generator=generator).tolist()
    seen: list[Seen] = []
    shifted: list[Seen] = []
    still, moved = Row((), 0), Row((), _SHIFT)
    model.step([still], [ids], seen=seen)
    model.windows = _windows(_by_layer(model, seen))  # first of all: a layer that never attends has no keys
    model.step([moved], [ids], seen=shifted)
    made = still.own.chunk_kv()
    _settle_rotation(model, made, moved.own.chunk_kv())
    model.shared = _shared(made)
    _check_queries(model, ids, seen, shifted)
    sizes = {window: min(window, _WINDOW + 2 * rank) for rank, window in enumerate(model.windows)}
    shrunk = model.with_windows(sizes) if sizes else model
    _check_causal(shrunk, ids, sorted(sizes.values()))
    model.lacks = {**model.lacks, **_check_rows(shrunk, ids)}


def _by_layer(model: LanguageModel, seen: list[Seen]) -> list[Visible]:
    """What each layer sees, in order; a layer that attends never or several times has no KV that ragkv could keep."""
    times = Counter(one.layer for one in seen)
    for layer in range(max([model.layers, *(at + 1 for at in times)])):
        if not times[layer]:
            raise UnsupportedModelError(
                f"layer {layer} attends by code of its own, not through transformers' interface"
            )
        if times[layer] > 1:
            raise UnsupportedModelError(f"layer {layer} attends {times[layer]} times in one pass")
    found = {one.layer: one.visible for one in seen}
    for one in {id(v): v for v in found.values()}.values():
        require_rule(one)
    return [found[layer] for layer in range(model.layers)]


def _windows(layers: Iterable[Visible]) -> list[int]:
    return sorted({layer.window for layer in layers if layer.window is not None})


def _shared(made: ChunkKV) -> dict[int, int]:
    """The layers whose keys and values are, to the bit, those of an earlier one on the same device: which one."""
    found: dict[int, int] = {}
    pairs = list(zip(made.keys, made.values, strict=True))
    for layer, pair in enumerate(pairs):
        for before in range(layer):
            same = all(a.device == b.device and torch.equal(a, b) for a, b in zip(pair, pairs[before], strict=True))
            if before not in found and same:
                found[layer] = before
                break
    return found


def _settle_rotation(model: LanguageModel, still: ChunkKV, moved: ChunkKV) -> None:
    """Take the reading of the model's RoPE that moves the keys of `still` to those of `moved`; else it lacks MOVE."""
    limit = tolerance(model.dtype)
    turning = []
    for layer, (before, after) in enumerate(zip(still.keys, moved.keys, strict=True)):
        if not (before.isfinite().all() and after.isfinite().all()):
            raise UnsupportedModelError(f"its weights give keys in layer {layer} that are no finite numbers")
        if not _typical(before, after, _moving(model, layer, before)) <= limit:
            turning.append(layer)
    for rotary in model.rotaries if turning else ():
        if all(_moves(model, rotary, layer, still, moved) for layer in turning):
            kinds = tuple(kind if layer in turning else None for layer, kind in enumerate(rotary.kinds))
            model.rotary = replace(rotary, kinds=kinds)
            return
    model.rotary = without_rotary(model.layers)
    if turning:
        why = (
            f"keys of layer {turning[0]} do not follow its rotary embedding (they are changed after it, or beside it)"
            if model.rotaries
            else "it has no rotary positions"
        )
        model.lacks = {**model.lacks, Need.MOVE: f"{why}, so a chunk cannot be moved from where it was encoded"}


def _check_queries(model: LanguageModel, ids: list[int], still: list[Seen], near: list[Seen]) -> None:
    """Find models that scale queries by their position (Ministral 3, Beam): a chunk of theirs is another one elsewhere.

    A rotation leaves a query as long as it was. Such a model lacks MOVE, or may move chunks only as far as the scale
    stays the same. Far away fp32 angles are coarse, so a query's length changes a little in every model.
    """
    if Need.MOVE in model.lacks:
        return
    most = model.max_positions or _FURTHEST
    coarse = model.dtype not in (torch.float32, torch.float64)
    layer = _scaled(still, near, _FAR if coarse else _LENGTHS, typical=coarse)
    for within in () if layer is not None else (most, *_original_lengths(model, below=most)):
        far: list[Seen] = []
        model.step([Row((), max(0, within - len(ids)))], [ids], seen=far)
        layer = _scaled(still, far, _FAR, typical=True)
        if layer is None:
            model.moves_within = None if within == most else within
            return
    why = f"queries of layer {layer} are scaled by their position, so a chunk cannot be moved from where it was encoded"
    model.lacks = {**model.lacks, Need.MOVE: why}


def _original_lengths(model: LanguageModel, *, below: int) -> list[int]:
    """Lengths that a model was trained for before it was stretched, falling: up to there it may do otherwise."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    tables = (parameters, *(table for table in parameters.values() if isinstance(table, dict)))
    found = {table.get("original_max_position_embeddings") for table in tables}
    return sorted((int(n) for n in found if n is not None and PREFIX + sum(CHUNKS) < n < below), reverse=True)


def _scaled(still: list[Seen], moved: list[Seen], limit: float, *, typical: bool) -> int | None:
    """The first layer in which some token's queries have another length; the median head's, over its length.

    `typical`: the median token's, because in coarse numbers some tokens meet other experts (`_distance`) or attend
    differently after many layers.
    """
    for before, after in zip(still, moved, strict=True):
        change = ((after.lengths - before.lengths).abs() / before.lengths.clamp_min(1e-20)).median(0).values
        if not (change.median() if typical else change.max()) <= limit:
            return before.layer
    return None


def _moves(model: LanguageModel, rotary: Rotary, layer: int, still: ChunkKV, moved: ChunkKV) -> bool:
    """Whether it moves a layer's keys as the model does."""
    before, after = still.keys[layer], moved.keys[layer]
    offsets = torch.full((1, still.tokens), _SHIFT, device=before.device)
    try:
        turned = rotary.rotate(before[None], layer, offsets)[0]
    except _NOT_LIKE_THIS:
        return False
    moving = _moving(model, layer, before)
    return turned.shape == after.shape and _typical(turned, after, moving) <= tolerance(model.dtype)


def _moving(model: LanguageModel, layer: int, keys: Tensor) -> Tensor:
    """Which numbers of a head may have positions, `(head_dim,)`: the others must not hide what becomes of these."""
    for rotary in model.rotaries:
        with suppress(*_NOT_LIKE_THIS):
            return rotary.moving(layer, keys.shape[-1], keys.device)
    return torch.ones(keys.shape[-1], dtype=torch.bool, device=keys.device)


def _check_causal(model: LanguageModel, ids: list[int], windows: list[int]) -> None:
    tokens = torch.tensor([ids], device=model.device)
    with model.plain() as plain:  # it is not told positions: some families do not count them from 0 (RoBERTa)
        whole = plain(input_ids=tokens, use_cache=False).logits[0].float()
    row, cut = Row((), 0), len(ids) - _STEP
    seen: list[Seen] = []
    first = model.step([row], [ids[:cut]], every=True, seen=seen)
    last = model.step([row], [ids[cut:]], every=True)
    if _windows(_by_layer(model, seen)) != windows:
        raise UnsupportedModelError("its sliding windows stand where ragkv cannot find them to check them")
    _compare(model, torch.cat([first, last]), whole, "a causal pass differs from transformers' own result")


def _check_rows(model: LanguageModel, ids: list[int]) -> dict[Need, str]:
    """What the exam's rows say that the model lacks; UnsupportedModelError where an ordinary row is wrong."""
    sizes = [PREFIX, *CHUNKS, QUESTION]
    prefix, *chunks, question = (part.tolist() for part in torch.split(torch.tensor(ids), sizes))
    asked = cases(model.lacks)
    dense = Dense.of(asked, prefix, chunks, question, model.device)
    expected = model.whole(dense.ids, dense.positions, dense)
    prefix_kv, *alone = model.encode([prefix, *chunks])
    rows = rows_of(asked, prefix_kv, alone, model.encode(chunks, prefix=prefix_kv))
    found = _in_three_steps(model, rows, question)
    lacks: dict[Need, str] = {}
    for row, (at, case) in enumerate(zip(dense.asks, asked, strict=True)):
        off, limit = _distance(model, found[row], expected[row, at : at + QUESTION]), tolerance(model.dtype)
        if off <= limit:
            continue
        what = (
            f"a question over {case.what} differs from dense attention by {off:.1e} (at most {limit:.0e} is accepted)"
        )
        if case.need is None:
            raise UnsupportedModelError(what)
        lacks.setdefault(case.need, what)
    return lacks


def _in_three_steps(model: LanguageModel, rows: list[Row], question: list[int]) -> Tensor:
    """Logits `(rows, n, vocab)` of the question: most of it at once, then single tokens of rows of unequal length."""
    slabs = Slabs()
    for row in rows:
        row.own = slabs.place(len(question), 0, len(rows))
    found: list[list[Tensor]] = [[] for _ in rows]
    left = [list(question) for _ in rows]
    for at in range(3):
        takes = [len(question) - 1 - index % 2 if not at else 1 for index in range(len(rows))]
        reading = [index for index in range(len(rows)) if left[index]]
        ids = [left[index][: takes[index]] for index in reading]
        logits = model.step([rows[index] for index in reading], ids, every=True)
        for index, each in zip(reading, torch.split(logits, [len(part) for part in ids]), strict=True):
            found[index].append(each)
            left[index] = left[index][takes[index] :]
    return torch.stack([torch.cat(parts) for parts in found])


def _compare(model: LanguageModel, found: Tensor, expected: Tensor, what: str) -> None:
    off, limit = _distance(model, found, expected), tolerance(model.dtype)
    if not off <= limit:
        raise UnsupportedModelError(f"{what} by {off:.1e} (at most {limit:.0e} is accepted)")


def _distance(model: LanguageModel, found: Tensor, expected: Tensor) -> float:
    """‖a − b‖ / ‖b‖ of logits `(tokens, vocab)`; in the half types, of a model with experts, the median token's.

    There a router's near tie sends single tokens to other experts in any two correct computations, which are then far
    from each other in these tokens; a wrong layout or mask is wrong in most.
    """
    off, size = found.float() - expected.float(), expected.float()
    whole = float(off.norm() / size.norm().clamp_min(1e-20))
    if model.dtype in (torch.float32, torch.float64) or not _routed(model.config):
        return whole
    return float((off.norm(dim=-1) / size.norm(dim=-1).clamp_min(1e-20)).median())


def _routed(config: object) -> bool:
    counts = (getattr(config, name, None) for name in _EXPERTS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def _typical(found: Tensor, expected: Tensor, moving: Tensor) -> float:
    """The median token's ‖a − b‖ / ‖b‖ of keys `(kv_heads, tokens, head_dim)`, or of their `moving` numbers if worse.

    In the half types a router's near tie may send single tokens to other experts; a wrong rotation moves every token.
    """
    worst = 0.0
    for part in (slice(None), moving):
        off, size = (t.float()[..., part].norm(dim=(0, 2)) for t in (found.float() - expected.float(), expected))
        worst = max(worst, float((off / size.clamp_min(1e-20)).median()))
    return worst


def _name(model: LanguageModel) -> str:
    return f"Model {model.checkpoint.name!r} ({model.config.model_type})"
