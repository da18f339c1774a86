"""The self-check on load (docs/design.md): ragkv computes what transformers computes, or the model is refused.

A silently wrong answer is the most common failure of KV reuse. `check_model` compares keys and logits in a handful of
forward passes over about 25 tokens. Its test cases are five sequences that read the same chunks as the engines do:
Block-Attention (chunks encoded alone and moved), APE with a temperature and a weight, an expert of PCED, APE's other
mode, and Block-Attention with the chunks in reverse order. They share one step, so a chunk is read for several
sequences at once, with different offsets and weights. The reference is one dense attention over all tokens of a
sequence, with explicit positions and masks; nothing in it is rotated back, merged or read from a cache.

Two faults would go unnoticed at that length. Windows are thousands of tokens long, so the passes run on a shallow copy
of the model (`shallow_copy`) whose windows are shrunk to a few tokens, in transformers' own pass too. (A random
miniature would be cheaper for a large model, but would need valid sizes for every family and would test other weights.)
What a mask does far from the diagonal is tested by calling transformers' own mask function at such distances.

`check_stateful` is the self-check of a model that resumes stored caches (`StatefulModel`). Its reference is
transformers' forward over whole sequences without a cache; it is compared with the same sequences resumed from their
stored form while other sequences were read in between. Families differ in which ways of resuming are exact
(`ResumeOptions`), so each is tried. `load_model` loads a model, checks it, and chooses between the two kinds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.partial import LayerCall
from ragkv.attention.rope import Rotary
from ragkv.attention.sequence import ChunkGroup, KVArena, TokenSequence
from ragkv.errors import ModelLoadError, RagkvError, UnsupportedModelError
from ragkv.model.attention_hook import LayerMask, Visible, require_rule, without_rotary
from ragkv.model.checkpoint import Checkpoint, pick_devices, require_on_hub, resolve
from ragkv.model.language_model import LanguageModel, shallow_copy
from ragkv.model.linear import int8_weights, optimize_layers
from ragkv.model.loading import chooses_by_index, describe_error, open_checkpoint, quiet_loading
from ragkv.model.stateful import ResumeOptions, StatefulModel
from ragkv.model.verdict import CheckRecord
from ragkv.types import Capability
from ragkv.util.display import first_sentence

logger = logging.getLogger(__name__)

PREFIX, CHUNKS, QUESTION = 5, (9, 7), 4
"""Tokens of the prefix, of the two chunks and of the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCase:
    """The prompt of one test case: which chunks it reads (`starts`: chunk -> position of its first token), and how.

    `alone`: they were encoded without the prefix. `temperature`, `scale` and `scale_mode` are the group's. `need` is
    the capability that the case tests (None: every model must pass it); `what` names it in a refusal.
    """

    what: str
    starts: dict[int, int]
    need: Capability | None = None
    alone: bool = False
    temperature: float = 1.0
    scale: float = 1.0
    scale_mode: Literal["power", "log"] = "power"

    @property
    def ask(self) -> int:
        """Position of the question's first token."""
        return max(start + CHUNKS[chunk] for chunk, start in self.starts.items())

    def sequence(self, prefix: ChunkKV, chunks: Sequence[ChunkKV]) -> TokenSequence:
        """The case as an engine builds it: a sequence over the prefix and a group of chunks."""
        group = ChunkGroup(
            segments=tuple(PlacedChunk(kv=chunks[chunk], start=start) for chunk, start in self.starts.items()),
            temperature=self.temperature,
            scale=self.scale,
            scale_mode=self.scale_mode,
        )
        return TokenSequence((ChunkGroup(segments=(PlacedChunk(kv=prefix, start=0),)), group), self.ask)


_TOGETHER = {0: PREFIX, 1: PREFIX}
CASES = (
    CheckCase(what="moved chunks", starts={0: PREFIX, 1: PREFIX + CHUNKS[0]}, alone=True, need=Capability.MOVE),
    CheckCase(what="a weighted group of chunks", starts=_TOGETHER, temperature=0.6, scale=0.5, need=Capability.MERGE),
    CheckCase(what="a chunk of its own", starts={1: PREFIX}),
    CheckCase(
        what="a group weighted by its other mode",
        starts=_TOGETHER,
        temperature=0.6,
        scale=4.0,
        scale_mode="log",
        need=Capability.MERGE,
    ),
    CheckCase(
        what="chunks in another order", starts={1: PREFIX, 0: PREFIX + CHUNKS[1]}, alone=True, need=Capability.MOVE
    ),
)
"""In the order of the step."""


class DenseReference:
    """The test cases as whole sequences, padded on the right, and one dense attention over them.

    `ids` and `positions` `(rows, n)`; `asks` is where each question begins.
    """

    def __init__(
        self,
        cases: Sequence[CheckCase],
        prefix: list[int],
        chunks: Sequence[list[int]],
        question: list[int],
        device: torch.device,
    ) -> None:
        longest = PREFIX + sum(CHUNKS) + QUESTION
        ids = torch.full((len(cases), longest), prefix[0])
        positions = torch.arange(longest).repeat(len(cases), 1)
        visible = torch.eye(longest, dtype=torch.bool).repeat(len(cases), 1, 1)  # (rows, n, n), windows not counted
        weighed = torch.zeros_like(visible)  # by a query of the question, a key of the weighted group
        self.asks: list[int] = []
        for index, case in enumerate(cases):
            parts = [(prefix, 0), *((chunks[c], start) for c, start in case.starts.items()), (question, case.ask)]
            start_index = 0
            for tokens, start in parts:
                end = start_index + len(tokens)
                ids[index, start_index:end] = torch.tensor(tokens)
                positions[index, start_index:end] = torch.arange(start, start + len(tokens))
                visible[index, start_index:end, start_index:end] = torch.ones(
                    len(tokens), len(tokens), dtype=torch.bool
                ).tril()
                sees = start_index if tokens is question else 0 if case.alone else min(start_index, PREFIX)
                visible[index, start_index:end, :sees] = True
                start_index = end
            self.asks.append(start_index - QUESTION)
            weighed[index, start_index - QUESTION : start_index, PREFIX : start_index - QUESTION] = True
        self.ids, self.positions = ids.to(device), positions.to(device)
        self._masks = visible[:, None].to(device), weighed[:, None].to(device)
        # 1/T, power and factor: the group's sum Z of exp(s/T) enters the sequence's softmax as factor·Z^power
        logs = [case.scale_mode == "log" for case in cases]
        numbers = (
            [1 / case.temperature for case in cases],
            [case.temperature * (1 if log else case.scale) for case, log in zip(cases, logs, strict=True)],
            [case.scale if log else 1.0 for case, log in zip(cases, logs, strict=True)],
        )
        self._weights = [torch.tensor(each, device=device)[:, None, None, None] for each in numbers]

    def attend(self, call: LayerCall) -> Tensor:
        """One softmax per query over all keys of its sequence, in fp32; with a weighted group, APE Eq. 5."""
        query = call.query
        # a split model's layers are on several devices
        seen, weighed, sharpness, power, factor, positions = (
            t.to(query.device) for t in (*self._masks, *self._weights, self.positions)
        )
        groups = query.shape[1] // call.key.shape[1]
        key, value = (t.repeat_interleave(groups, 1).float() for t in (call.key, call.value))
        scores = query.float() @ key.transpose(-1, -2) * call.scale  # (rows, q_heads, n, n)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.window is not None:
            seen = seen & (positions[:, None, :, None] - positions[:, None, None, :] < call.window)
        scores = scores.masked_fill(~seen, -torch.inf)
        sharp = (scores * sharpness).masked_fill(~weighed, -torch.inf)
        total = sharp.logsumexp(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        scores = torch.where(weighed & seen, sharp + (power - 1) * total + factor.log(), scores)
        if call.sink is not None:
            scores = torch.cat([scores, call.sink.float()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1)[..., : key.shape[2]]
        return (weights @ value).to(query.dtype)


_SHIFT = 11
_NOT_LIKE_THIS = (TypeError, RuntimeError, ValueError, LookupError, AttributeError)
"""What a rotary function raises if it is called with the wrong arguments."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_STEP = 3  # the last tokens of the causal pass are a separate step, over the sequence's cached KV
_LENGTHS, _COARSE, _FURTHEST = 1e-5, 4e-3, 1 << 15
_WINDOW = 8  # windows are shrunk to this: it ends inside the second chunk for every case's question


def tolerance(dtype: torch.dtype) -> float:
    """Largest accepted ‖a − b‖ / ‖b‖; a wrong layout gives about 1.

    The half types differ by rounding between any two correct kernels: up to 0.045 on random 9-layer models.
    """
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.1


def check_model(model: LanguageModel) -> None:
    """Refuse a model whose keys or logits differ from its own implementation's.

    (1) Every layer attends once, under a mask that is causal or a causal window; `model.windows` records which. (2)
    Keys of the same tokens at shifted positions are R(shift)·keys, layer by layer; a layer whose keys do not change has
    no RoPE, and its queries are never rotated. (3) A causal pass, its end in a separate step, equals transformers'. (4)
    The test cases equal a dense reference. If only moved or merged chunks fail, that is recorded in
    `model.missing_capabilities` and the engines that need them are refused; any other failure refuses the model.

    Raises UnsupportedModelError with the model's name and family for any error inside the model; ModelLoadError if it
    does not fit into memory.
    """
    try:
        _compare(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{_name(model)} is not supported: {str(error).rstrip('.')}.") from error
    except RagkvError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelLoadError(f"{_name(model)} does not fit into memory; load it on a larger device.") from error
    except Exception as error:
        reason = first_sentence(error)
        masks = "'Visible'" in reason  # the class of ragkv's masks
        what = "it uses its attention mask as a tensor" if masks else f"ragkv cannot run its attention ({reason})"
        raise UnsupportedModelError(f"{_name(model)} is not supported: {what}.") from error


def _compare(model: LanguageModel) -> None:
    model.missing_capabilities, model.moves_within, model.shared = {}, None, {}
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size, 1000)
    ids = torch.randint(3, vocabulary, (PREFIX + sum(CHUNKS) + QUESTION,), generator=generator).tolist()
    seen: list[LayerMask] = []
    still, moved = TokenSequence((), 0), TokenSequence((), _SHIFT)
    model.step([still], [ids], seen=seen)
    model.windows = _windows(_by_layer(model, seen))  # first of all: a layer that never attends has no keys
    model.step([moved], [ids])
    made = still.cache.chunk_kv()
    _choose_rotation(model, made, moved.cache.chunk_kv())
    model.shared = _shared(made)
    _check_lengths(model, ids)
    sizes = {window: min(window, _WINDOW + 2 * rank) for rank, window in enumerate(model.windows)}
    shrunk = model.with_windows(sizes) if sizes else model
    _check_causal(shrunk, ids, sorted(sizes.values()))
    model.missing_capabilities = {**model.missing_capabilities, **_check_rows(shrunk, ids)}


def _by_layer(model: LanguageModel, seen: list[LayerMask]) -> list[Visible]:
    """What each layer sees, in order; a layer must attend exactly once, or ragkv cannot keep its KV."""
    times = Counter(mask.layer for mask in seen)
    for layer in range(max([model.layers, *(at + 1 for at in times)])):
        if not times[layer]:
            raise UnsupportedModelError(f"layer {layer} does not call transformers' attention interface")
        if times[layer] > 1:
            raise UnsupportedModelError(f"layer {layer} computes attention {times[layer]} times per forward pass")
    visible = {mask.layer: mask.visible for mask in seen}
    for mask in {id(v): v for v in visible.values()}.values():
        require_rule(mask)
    return [visible[layer] for layer in range(model.layers)]


def _windows(layers: Iterable[Visible]) -> list[int]:
    return sorted({layer.window for layer in layers if layer.window is not None})


def _shared(kv: ChunkKV) -> dict[int, int]:
    """The layers whose keys and values are identical to an earlier layer's on the same device, and that layer."""
    shared: dict[int, int] = {}
    pairs = list(zip(kv.keys, kv.values, strict=True))
    for layer, pair in enumerate(pairs):
        for before in range(layer):
            same = all(a.device == b.device and torch.equal(a, b) for a, b in zip(pair, pairs[before], strict=True))
            if before not in shared and same:
                shared[layer] = before
                break
    return shared


def _choose_rotation(model: LanguageModel, still: ChunkKV, moved: ChunkKV) -> None:
    """Choose the RoPE candidate that maps the keys of `still` to those of `moved`; if none does, the model lacks
    MOVE.
    """
    limit = tolerance(model.dtype)
    rotated = []
    for layer, (before, after) in enumerate(zip(still.keys, moved.keys, strict=True)):
        if not (before.isfinite().all() and after.isfinite().all()):
            raise UnsupportedModelError(f"its keys in layer {layer} are not finite numbers")
        if not _typical(before, after, _moving(model, layer, before)) <= limit:
            rotated.append(layer)
    for rotary in model.rotaries if rotated else ():
        if all(_moves(model, rotary, layer, still, moved) for layer in rotated):
            kinds = tuple(kind if layer in rotated else None for layer, kind in enumerate(rotary.kinds))
            model.rotary = replace(rotary, kinds=kinds)
            return
    model.rotary = without_rotary(model.layers)
    if rotated:
        why = (
            f"keys of layer {rotated[0]} are changed after or besides its rotary embedding"
            if model.rotaries
            else "it has no rotary positions"
        )
        model.missing_capabilities = {
            **model.missing_capabilities,
            Capability.MOVE: f"{why}, so chunks cannot be moved to other positions",
        }


def _check_lengths(model: LanguageModel, ids: list[int]) -> None:
    """Find models that scale queries by position (Ministral 3, Beam), whose chunks cannot simply be moved.

    A rotation keeps the length of queries and keys. The same tokens are read near the start, before and after each
    length that the model was first trained for, and at its last positions. Every position gets the attention result of
    the first one, so that every layer's input is the same everywhere, even where angles are coarse. A model whose
    lengths differ somewhere lacks MOVE, or may move chunks only as far as they stay the same.
    """
    if Capability.MOVE in model.missing_capabilities:
        return
    most = model.max_positions or _FURTHEST
    trained = _original_lengths(model, below=most)
    n = len(ids)
    before, past = [(at - n, at) for at in trained], [(at, at + 1) for at in trained]
    places = [(0, 0), (_SHIFT, 0), (most - n, most), *before, *past]  # with the shortest prompt that each concerns
    starts = torch.tensor([max(0, start) for start, _ in places])
    positions = (starts[:, None] + torch.arange(n)).to(model.device)  # (places, n)
    alike = _Alike()
    model.whole(torch.tensor([ids] * len(places)).to(model.device), positions, alike)
    layers = [alike.scaled(place, model.dtype) for place in range(len(places))]
    for within in (most, *trained):
        if all(layer is None for layer, (_, matters) in zip(layers, places, strict=True) if matters <= within):
            model.moves_within = None if within == most else within
            return
    layer = next(layer for layer in layers if layer is not None)
    why = f"layer {layer} scales queries by position, so chunks cannot be moved to other positions"
    model.missing_capabilities = {**model.missing_capabilities, Capability.MOVE: why}


class _Alike:
    """Attention that returns the first position's self-attention everywhere, and records the lengths of vectors."""

    def __init__(self) -> None:
        self._lengths: list[tuple[int, Tensor]] = []

    def attend(self, call: LayerCall) -> Tensor:
        """As `AttentionBackend.attend`, over places `(places, heads, n, head_dim)`."""
        # (places, heads, n)
        self._lengths += [(call.layer, states.float().norm(dim=-1)) for states in (call.query, call.key)]
        groups = call.query.shape[1] // call.value.shape[1]
        return call.value[:1].repeat_interleave(groups, 1).expand(len(call.query), -1, -1, -1)

    def scaled(self, place: int, dtype: torch.dtype) -> int | None:
        """The first layer in which queries or keys at a position have other lengths than at the first position.

        A token counts by its median head; in the half types, where angles are rounded too, the median token counts.
        """
        for layer, lengths in self._lengths:
            change = (lengths[place] - lengths[0]) / lengths[0].clamp_min(1e-20)
            exact = dtype in (torch.float32, torch.float64)
            off = change.median(0).values.abs().max() if exact else change.median().abs()
            if not off <= (_LENGTHS if exact else _COARSE):
                return layer
        return None


def _original_lengths(model: LanguageModel, *, below: int) -> list[int]:
    """The lengths that a model was trained for before it was extended, descending; its behaviour may change there."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    tables = (parameters, *(table for table in parameters.values() if isinstance(table, dict)))
    found = {table.get("original_max_position_embeddings") for table in tables}
    return sorted((int(n) for n in found if n is not None and PREFIX + sum(CHUNKS) < n < below), reverse=True)


def _moves(model: LanguageModel, rotary: Rotary, layer: int, still: ChunkKV, moved: ChunkKV) -> bool:
    """Whether a candidate rotation moves a layer's keys as the model does."""
    before, after = still.keys[layer], moved.keys[layer]
    offsets = torch.full((1, still.tokens), _SHIFT, device=before.device)
    try:
        rotated = rotary.rotate(before[None], layer, offsets)[0]
    except _NOT_LIKE_THIS:
        return False
    moving = _moving(model, layer, before)
    return rotated.shape == after.shape and _typical(rotated, after, moving) <= tolerance(model.dtype)


def _moving(model: LanguageModel, layer: int, keys: Tensor) -> Tensor:
    """Which elements of a head may depend on positions, `(head_dim,)`: the rest must not hide errors in these."""
    for rotary in model.rotaries:
        with suppress(*_NOT_LIKE_THIS):
            return rotary.moving(layer, keys.shape[-1], keys.device)
    return torch.ones(keys.shape[-1], dtype=torch.bool, device=keys.device)


def _check_causal(model: LanguageModel, ids: list[int], windows: list[int]) -> None:
    tokens = torch.tensor([ids], device=model.device)
    with model.plain() as plain:  # without explicit positions: some families do not count them from 0 (RoBERTa)
        whole = plain(input_ids=tokens, use_cache=False).logits[0].float()
    sequence, cut = TokenSequence((), 0), len(ids) - _STEP
    seen: list[LayerMask] = []
    first = model.step([sequence], [ids[:cut]], every=True, seen=seen)
    last = model.step([sequence], [ids[cut:]], every=True)
    if _windows(_by_layer(model, seen)) != windows:
        raise UnsupportedModelError("ragkv cannot find and check its sliding windows")
    off = _distance(model, torch.cat([first, last]), whole)
    _require(off, tolerance(model.dtype), "a causal forward pass differs from transformers' result")


def _check_rows(model: LanguageModel, ids: list[int]) -> dict[Capability, str]:
    """The capabilities that the model lacks by the test cases; UnsupportedModelError if a mandatory case is wrong."""
    sizes = [PREFIX, *CHUNKS, QUESTION]
    prefix, *chunks, question = (part.tolist() for part in torch.split(torch.tensor(ids), sizes))
    asked = [case for case in CASES if case.need not in model.missing_capabilities]
    dense = DenseReference(asked, prefix, chunks, question, model.device)
    expected = model.whole(dense.ids, dense.positions, dense)
    prefix_kv, *alone = model.encode([prefix, *chunks])
    prefixed = model.encode(chunks, prefix=prefix_kv)
    sequences = [case.sequence(prefix_kv, alone if case.alone else prefixed) for case in asked]
    found = _in_three_steps(model, sequences, question)
    missing_capabilities: dict[Capability, str] = {}
    for row, (at, case) in enumerate(zip(dense.asks, asked, strict=True)):
        off, limit = _distance(model, found[row], expected[row, at : at + QUESTION]), tolerance(model.dtype)
        if off <= limit:
            continue
        what = (
            f"a question over {case.what} differs from dense attention by {off:.1e} (at most {limit:.0e} is accepted)"
        )
        if case.need is None:
            raise UnsupportedModelError(what)
        missing_capabilities.setdefault(case.need, what)
    return missing_capabilities


def _in_three_steps(model: LanguageModel, sequences: list[TokenSequence], question: list[int]) -> Tensor:
    """Logits `(sequences, n, vocab)` of the question: most of it at once, then single tokens, the sequences differing
    in length.
    """
    arena = KVArena()
    for sequence in sequences:
        sequence.cache = arena.place(len(question), 0, len(sequences))
    rows: list[list[Tensor]] = [[] for _ in sequences]
    left = [list(question) for _ in sequences]
    for at in range(3):
        takes = [len(question) - 1 - index % 2 if not at else 1 for index in range(len(sequences))]
        reading = [index for index in range(len(sequences)) if left[index]]
        ids = [left[index][: takes[index]] for index in reading]
        logits = model.step([sequences[index] for index in reading], ids, every=True)
        for index, each in zip(reading, torch.split(logits, [len(part) for part in ids]), strict=True):
            rows[index].append(each)
            left[index] = left[index][takes[index] :]
    return torch.stack([torch.cat(parts) for parts in rows])


def _require(off: float, limit: float, what: str) -> None:
    if not off <= limit:
        raise UnsupportedModelError(f"{what} by {off:.1e} (at most {limit:.0e} is accepted)")


def _distance(model: LanguageModel, logits: Tensor, expected: Tensor) -> float:
    """‖a − b‖ / ‖b‖ of logits `(tokens, vocab)`; in the half types, for a model with experts, that of the median token.

    A router's near tie then sends single tokens to other experts in any two correct computations, and these tokens
    differ a lot; a wrong layout or mask is wrong in most tokens.
    """
    routed = model.dtype not in (torch.float32, torch.float64) and _routed(model.config)
    return float(_apart(logits, expected, -1 if routed else None).median())


def _apart(found: Tensor, expected: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """‖a − b‖ / ‖b‖ over all numbers, or along `dim`."""
    found, expected = found.float(), expected.float()
    off: Tensor = (found - expected).norm(dim=dim)
    size: Tensor = expected.norm(dim=dim)
    return off / size.clamp_min(1e-20)


def _routed(config: object) -> bool:
    counts = (getattr(config, name, None) for name in _EXPERTS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def _typical(states: Tensor, expected: Tensor, moving: Tensor) -> float:
    """The median token's ‖a − b‖ / ‖b‖ of keys `(kv_heads, tokens, head_dim)`, or of their `moving` numbers if worse.

    In the half types a router's near tie may send single tokens to other experts; a wrong rotation moves every token.
    """
    parts = (slice(None), moving)
    return max(float(_apart(states[..., part], expected[..., part], (0, 2)).median()) for part in parts)


def _name(model: LanguageModel) -> str:
    return f"Model {model.checkpoint.name!r} ({model.config.model_type})"


_PREFIX, _CHUNKS, _QUESTION = 5, (9, 16, 9, 64), 16
_LONG = 270
"""Tokens of an additional chunk: recurrent layers read a pass in blocks of at most 256 tokens."""
_SINGLE = 12
"""Tokens of the question that are read one at a time."""
_ROUNDINGS = 0.6
"""The accepted distance, relative to two whole forwards that round differently; exact options give 0.2 to 0.5."""
_RESUMED = "logits computed from the cache differ from those of a whole forward pass"
_ALL = ResumeOptions()
_ALONE = ResumeOptions(several=False, ragged=False, ragged_several=False, together=False)


def check_stateful(model: StatefulModel) -> None:
    """Find the options with which `model` resumes exactly, and set them; UnsupportedModelError if there are none.

    In the half types rounding hides much, so the options are found with the same weights in float32. If these cannot
    run in float32 (packed weights), an option may be as far off as two whole forwards that round differently.
    """
    sizes = {window: min(window, _WINDOW + 2 * rank) for rank, window in enumerate(model.windows)}
    shrunk = model.with_windows(sizes)
    exact, limit, check = tolerance(torch.float32), tolerance(model.dtype), _SelfCheck(shrunk)
    if limit <= exact:
        model.resume_options = _resume_options(check, exact)
        return
    try:
        wide = _SelfCheck(shrunk.in_float32())
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        logger.debug("model %s does not run in float32: %s", model.checkpoint.name, error)
        model.resume_options = _resume_options(check, min(limit, max(_ROUNDINGS * check.rounding(), exact)))
        return
    model.resume_options = _resume_options(wide, exact)
    off = check.off(model.resume_options)
    if not off <= limit:
        _require(off, check.rounding(), _RESUMED)


def _resume_options(check: _SelfCheck, limit: float) -> ResumeOptions:
    """The first options whose distance is at most `limit`."""
    # blocks of keys are counted with the padding, thousands of tokens later
    whole = replace(_ALL, ragged=False, ragged_several=False) if chooses_by_index(check.config) else _ALL
    if check.off(whole) <= limit:
        return whole
    several = replace(_ALONE, several=True)
    most = several if check.off(several) <= limit else _ALONE
    for options in (replace(most, together=True, ragged=whole.ragged), replace(most, together=True)):
        if check.off(options) <= limit:
            return options
    _require(check.off(most), limit, _RESUMED)
    return most


class _SelfCheck:
    """The sequences [prefix, question] and [prefix, chunk, question], with their logits from whole forwards."""

    def __init__(self, model: StatefulModel) -> None:
        self._model = model
        self.config = model.config
        generator = torch.Generator().manual_seed(0)
        high = min(model.config.vocab_size, 1000)
        most = (model.max_positions or _LONG) - _PREFIX - _QUESTION
        sizes = (_PREFIX, *(min(n, most) for n in (*_CHUNKS, _LONG)), _QUESTION)
        self._prefix, *self._chunks, self._question = (
            torch.randint(3, high, (n,), generator=generator).tolist() for n in sizes
        )
        self._module = model.module
        self._expected = [self._whole([*self._prefix, *part, *self._question]) for part in ([], *self._chunks)]
        alone = self._whole(self._prefix)
        if any(not _state_distance(logits[:_PREFIX], alone) <= tolerance(model.dtype) for logits in self._expected):
            raise UnsupportedModelError("a token's logits depend on the tokens after it")

    def rounding(self) -> float:
        """How far rounding alone moves whole-forward logits, if every layer's result changes in its last bit."""
        self._module, before = shallow_copy(self._module), self._module
        generator = torch.Generator().manual_seed(0)

        def rounded(_module: nn.Module, _given: Any, out: Any) -> Any:
            if not isinstance(out, Tensor) or not out.is_floating_point():
                return out
            noise = torch.rand(out.shape, generator=generator).to(out.device) * 2 - 1
            return (out.float() * (1 + torch.finfo(self._model.dtype).eps * noise)).to(out.dtype)

        for module in self._module.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(rounded)
        found = [self._whole([*self._prefix, *part, *self._question]) for part in ([], *self._chunks)]
        self._module = before
        ends = ((each[-_QUESTION:], whole[-_QUESTION:]) for each, whole in zip(found, self._expected, strict=True))
        return max(_state_distance(each, whole) for each, whole in ends)

    def off(self, options: ResumeOptions) -> float:
        """The largest distance between logits read with these options and those of whole forwards; infinite on failure.

        The longest chunk is left out if every token of it takes a pass.
        """
        model = self._model.with_resume_options(options)
        expected = self._expected if options.several else self._expected[:-1]
        try:
            [prefix] = model.encode([self._prefix])
            before = PlacedChunk(kv=prefix, start=0)
            chunks = model.encode(self._chunks[: len(expected) - 1], prefix=prefix)
            seen = [(before,), *((before, PlacedChunk(kv=chunk, start=_PREFIX)) for chunk in chunks)]
            logits = self._ask(model, [TokenSequence.over(chunks, position=chunks[-1].end) for chunks in seen])
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            if options != _ALONE:
                return torch.inf
            raise UnsupportedModelError(f"a forward pass that reads it fails ({first_sentence(error)})") from error
        return max(_state_distance(each, whole[-len(each) :]) for each, whole in zip(logits, expected, strict=True))

    def _ask(self, model: StatefulModel, sequences: Sequence[TokenSequence]) -> list[Tensor]:
        """Logits of each question: its first part at once, the rest token by token, with the sequences reordered."""
        half = len(self._question) - _SINGLE
        answers = [[row] for row in self._read(model, sequences, self._question[:half])]
        for at in range(half, len(self._question)):
            asked = sequences if at % 2 else sequences[::-1]
            logits = self._read(model, asked, self._question[at : at + 1])
            for sequence, row in zip(asked, logits, strict=True):
                answers[sequences.index(sequence)].append(row)
        return [torch.cat(row) for row in answers]

    def _read(self, model: StatefulModel, sequences: Sequence[TokenSequence], ids: list[int]) -> list[Tensor]:
        return list(torch.split(model.step(sequences, [ids] * len(sequences), every=True), len(ids)))

    @torch.inference_mode()
    def _whole(self, ids: list[int]) -> Tensor:
        tokens = torch.tensor([ids], device=self._model.device)
        logits: Tensor = self._module(input_ids=tokens, use_cache=False).logits
        return logits[0].float()


def _state_distance(found: Tensor, expected: Tensor) -> float:
    off = float(_apart(found, expected))
    return off if off == off else torch.inf


_REFUSAL = " is not supported: "


def load_model(name: str, *, dtype: str = "auto", device: str | None = None, train: bool = False) -> LanguageModel:
    """Load a model by its name (`ragkv.model.checkpoint.resolve`); refuses what ragkv cannot run exactly.

    `dtype` "auto" is the checkpoint's own; "int8" is float32 whose weights are rounded to int8 after the check.
    `train` leaves all weights where transformers keeps them (`ragkv.model.linear.optimize_layers`).
    Raises ModelLoadError or UnsupportedModelError.
    """
    checkpoint = resolve(name)
    if not checkpoint.local:
        require_on_hub(checkpoint.location)
    devices = pick_devices(device, checkpoint.weight_bytes)
    float_dtype = "float32" if dtype == "int8" else dtype
    optimize = int8_weights if dtype == "int8" else optimize_layers
    record = None
    with suppress(ModelLoadError):  # files are missing: opening the checkpoint says which
        record = CheckRecord.of(checkpoint, float_dtype, devices)
    if record is not None and not train:
        with describe_error("Model", name):
            loaded = record.plain_model()
            if loaded is not None:
                loaded.optimize = optimize
                optimize(loaded)
                return loaded
    model, tokenizer = open_checkpoint(checkpoint, dtype=float_dtype, devices=devices)
    with describe_error("Model", name), quiet_loading(reports=False):
        if record is None:
            revision = getattr(model.config, "_commit_hash", None)
            record = CheckRecord.of(checkpoint, float_dtype, devices, revision)
        loaded = load_checked(model, tokenizer, checkpoint, record)
        if dtype == "int8" or not train:
            optimize(loaded)
        return loaded


def load_checked(
    model: Any, tokenizer: Any, checkpoint: Checkpoint, record: CheckRecord | None = None
) -> LanguageModel:
    """Load a model and check that its numbers are transformers' own, unless a `record` on it is kept.

    A model whose chunks cannot be merged or moved exactly is run by resuming its cache (`StatefulModel`), if that is
    exact; `missing_capabilities` says why. Raises UnsupportedModelError with both reasons, and ModelLoadError when the
    memory does not suffice.
    """
    text = model.config.get_text_config(decoder=True)
    name = f"Model {checkpoint.name!r} ({text.model_type})"
    decoder = getattr(text, "decoder_layers", text.num_hidden_layers)
    if decoder != text.num_hidden_layers:
        raise UnsupportedModelError(
            f"{name}{_REFUSAL}its num_hidden_layers is the encoder's ({text.num_hidden_layers}), "
            f"and its decoder has {decoder}."
        )
    try:
        loaded = LanguageModel(model, tokenizer, checkpoint)
        if record is None or not record.settle(loaded):
            check_model(loaded)
            if record is not None:
                record.write(loaded)
        return loaded
    except UnsupportedModelError as error:
        because = _reason(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        because = f"its attention is not where ragkv expects it ({first_sentence(error)})"
    try:
        resumed = StatefulModel(model, tokenizer, checkpoint, because=because)
        check_stateful(resumed)
        return resumed
    except ModelLoadError:
        raise
    except (MemoryError, OSError) as error:
        raise ModelLoadError(f"{name} does not fit into memory; load it on a larger device.") from error
    except Exception as error:
        known = isinstance(error, UnsupportedModelError)
        why = str(error) if known else f"a forward pass that reads it fails ({first_sentence(error)})"
        raise UnsupportedModelError(
            f"{name}{_REFUSAL}{because}; and it cannot resume from its own cache: {why.rstrip('.')}."
        ) from error


def _reason(error: UnsupportedModelError) -> str:
    """The reason, to be used within a sentence."""
    return str(error).partition(_REFUSAL)[2].rstrip(".") or str(error).rstrip(".")
