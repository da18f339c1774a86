"""APB's blocks against its definition, and the special cases in which they equal other methods (fp32, tiny random
models).
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.errors import ConfigError
from ragkv.model.apb.compressors import BlockTokens, Compressor, KeyNorm, Random, chosen
from ragkv.model.apb.document import (
    BlockLayout,
    BlockLengths,
    LongDocument,
    SequentialExecutor,
    lengths_for,
    query_aware_compressor,
    star,
)

LIMIT = 3e-5
SHAPES = ("llama", "qwen3", "gemma3")
PREFIX = (0, 45, 46, 47, 48)
QUESTION = (90, 91, 92, 93, 94, 95, 96)


def drawn(n: int, seed: int = 3) -> tuple[int, ...]:
    return tuple(torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def lengths(block: int, anchor: int, passing: int) -> BlockLengths:
    return BlockLengths(block=block, anchor=anchor, passing=passing)


def book_of(
    model: Any,
    ids: tuple[int, ...],
    cut: BlockLengths,
    compressor: Compressor | None = None,
    *,
    prefix: Sequence[int] = PREFIX,
    asked: tuple[int, ...] = (),
) -> LongDocument:
    kv = model.encode([prefix])[0] if prefix else None
    layout = BlockLayout(tokens=len(ids), lengths=cut, start=len(prefix), question=len(asked))
    return LongDocument(
        model=model, layout=layout, ids=ids, compressor=compressor or KeyNorm(), prefix=kv, question_ids=asked
    )


def answered(long_document: LongDocument, kvs: Sequence[ChunkKV]) -> Tensor:
    """Logits of the question after the document's blocks."""
    seen = [] if long_document.prefix is None else [PlacedChunk(kv=long_document.prefix, start=0)]
    seen += [PlacedChunk(kv=kv, start=kv.encoded_at) for kv in kvs]
    logits: Tensor = long_document.model.step(
        [TokenSequence.over(seen, position=long_document.layout.end)], [QUESTION], every=True
    )
    return logits


def logits_of(long_document: LongDocument) -> Tensor:
    return answered(long_document, [block.kv for block in SequentialExecutor().run(long_document)])


def full_logits(long_document: LongDocument) -> Tensor:
    """transformers' logits of the same question, over the whole prompt."""
    head = () if long_document.prefix is None else PREFIX
    ids = torch.tensor([[*head, *long_document.ids, *QUESTION]])
    with long_document.model.plain() as plain:
        found: Tensor = plain(input_ids=ids, use_cache=False).logits[0, -len(QUESTION) :].float()
    return found


class DenseBook:
    """APB by its definition: one dense pass over [prefix, anchor, document, question] with a mask for each kv head.

    Nothing is cached, cut or merged. Tokens have a kind: 0 prefix, 1 anchor, 2 + h block h, and -1 the question after
    the document. `score` of (layer, query, key, value of some tokens `(heads, n, head_dim)`, position of the first) is
    `(kv_heads, n)`.
    """

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


def dense_of(long_document: LongDocument, score: Any) -> Tensor:
    layout = long_document.layout
    blocks = [len(layout.span(block)) for block in range(layout.blocks)]
    anchor = (*long_document.question_ids, *long_document.ids[: layout.anchor_head])
    dense = DenseBook(
        layout.start, len(anchor), layout.anchor_head, blocks, len(QUESTION), layout.lengths.passing, score
    )
    head = () if long_document.prefix is None else PREFIX
    ids = torch.tensor([[*head, *anchor, *long_document.ids, *QUESTION]])
    logits: Tensor = long_document.model.whole(ids, dense.position[None], dense)[0]
    return logits[-len(QUESTION) :]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def by_key_norm(layer: int, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    return -key.float().norm(dim=-1)


@pytest.mark.parametrize("seed", range(4))
def test_keys_of_one_norm_but_for_rounding_are_passed_on_in_their_order(seed: int) -> None:
    """Two processors compute the same keys with different last bits."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(3, 500, 64, generator=generator, dtype=torch.float64)
    wide /= wide.norm(dim=-1, keepdim=True)
    wide[1, 300:] *= torch.linspace(0.5, 0.9, 200, dtype=torch.float64)[:, None]  # smaller norms are chosen first
    wide[2] *= torch.rand(500, 1, generator=generator, dtype=torch.float64) + 0.5
    for noise in (0, 1e-7, -1e-7):
        off = 1 + noise * torch.randn(wide.shape, generator=generator, dtype=torch.float64)
        key = (wide * off).float()
        local = BlockTokens(
            layer=0, position=0, query=key, key=key, value=key, scale=1.0, unrotated=lambda key=key: (key, key)
        )
        found = chosen(KeyNorm(), local, 230)
        assert found[0].tolist() == list(range(230))
        assert found[1].tolist() == [*range(30), *range(300, 500)]
        assert found[2].tolist() == sorted(wide[2].norm(dim=-1).argsort()[:230].tolist())


def by_random(layer: int, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    local = BlockTokens(
        layer=layer, position=first, query=query, key=key, value=value, scale=1.0, unrotated=lambda: (query, key)
    )
    return Random(seed=5).scores(local)


CUTS = {
    "uneven": (lengths(20, 6, 4), 75),
    "one token last": (lengths(20, 6, 4), 61),
    "shorter than l_p": (lengths(20, 6, 18), 47),
    "anchor whole": (lengths(16, 16, 5), 60),
    "no anchor": (lengths(16, 0, 5), 60),
    "star": (star(20), 75),
}


@pytest.mark.parametrize("cut", sorted(CUTS))
@pytest.mark.parametrize("family", SHAPES)
def test_blocks_are_those_of_a_dense_mask(make_model: Any, family: str, cut: str) -> None:
    sizes, n = CUTS[cut]
    # in Qwen3 and Gemma 3 all keys of a head have the same norm, up to rounding
    compressor, score = (KeyNorm(), by_key_norm) if family == "llama" else (Random(seed=5), by_random)
    long_document = book_of(make_model(family), drawn(n), sizes, compressor)
    expected = dense_of(long_document, score)
    assert off(logits_of(long_document), expected) < LIMIT
    if cut != "star":
        assert off(expected, full_logits(long_document)) > 10 * LIMIT  # APB differs from full attention


OTHERS = ("gemma2", "cohere2", "smollm3", "phi4-partial", "llama-yarn", "qwen2-tied-sliding", "gpt-oss")


@pytest.mark.parametrize("family", [*SHAPES, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_a_question_in_the_anchor(make_model: Any, family: str) -> None:
    limit = LIMIT if family in SHAPES else 1e-4
    long_document = book_of(make_model(family), drawn(75), lengths(20, 6, 4), Random(seed=5), asked=QUESTION)
    found = logits_of(long_document)
    assert off(found, dense_of(long_document, by_random)) < limit
    without = book_of(long_document.model, long_document.ids, lengths(20, 6, 4), Random(seed=5))
    assert off(found, logits_of(without)) > 10 * LIMIT


@pytest.mark.parametrize("family", ["gemma3n", "deepseek3"])
def test_layers_without_keys_of_their_own_and_latent_ones(make_model: Any, family: str) -> None:
    long_document = book_of(make_model(family), drawn(60), lengths(20, 0, 20))
    assert off(logits_of(long_document), full_logits(long_document)) < 1e-4


EQUAL = {
    "one block": (lengths(64, 8, 4), 60),
    "everything is passed on": (lengths(16, 0, 16), 60),
    "anchor tokens are not passed on again": (lengths(16, 6, 16), 60),
    "two blocks, the first is the anchor": (star(32), 60),
}


@pytest.mark.parametrize("case", sorted(EQUAL))
@pytest.mark.parametrize("family", SHAPES)
def test_equal_to_full_attention(make_model: Any, family: str, case: str) -> None:
    sizes, n = EQUAL[case]
    for prefix in ((), PREFIX):
        long_document = book_of(make_model(family), drawn(n), sizes, prefix=prefix)
        assert off(logits_of(long_document), full_logits(long_document)) < LIMIT


def test_appending_encodes_the_new_block_alone(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model("gemma3"), drawn(80)
    whole = list(SequentialExecutor().run(book_of(model, ids, lengths(20, 6, 4))))
    before = dict(enumerate(SequentialExecutor().run(book_of(model, ids[:60], lengths(20, 6, 4)))))
    ran: list[int] = []
    encode = LongDocument.encode
    monkeypatch.setattr(
        LongDocument, "encode", lambda self, block, *rest: ran.append(block) or encode(self, block, *rest)
    )
    after = list(SequentialExecutor().run(book_of(model, ids, lengths(20, 6, 4)), before))
    assert ran == [3]
    for old, new in zip(whole, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old.kv.tensors, new.kv.tensors, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(old.chosen, new.chosen, strict=True))


def test_a_question_chooses_what_is_passed_on(make_model: Any) -> None:
    """The labels for training retaining heads, computed from the model's own projections."""
    model, ids = make_model("llama"), drawn(60)
    prefix = model.encode([PREFIX])[0]
    asking = query_aware_compressor(model, QUESTION, prefix, position=len(PREFIX) + 60)
    first = model.module.model.layers[0]
    cos, sin = model.module.model.rotary_emb(torch.zeros(1), torch.arange(65, 65 + len(QUESTION))[None])
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    with torch.inference_mode():
        states = first.input_layernorm(model.module.model.embed_tokens(torch.tensor([QUESTION])))
        query = first.self_attn.q_proj(states).unflatten(-1, (4, 16)).transpose(1, 2)
        expected, _ = apply_rotary_pos_emb(query, query, cos, sin)
    assert off(asking.queries[0], expected[0]) < 1e-4
    long_document = book_of(model, ids, lengths(20, 6, 4), asking, asked=QUESTION)

    def score(layer: int, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        wanted = torch.zeros(key.shape[:2])
        for head in range(key.shape[0]):
            of_group = asking.queries[layer][2 * head : 2 * head + 2].flatten(0, 1)
            wanted[head] = (key[head] @ of_group.T).amax(-1) * 16**-0.5
        return wanted

    assert off(logits_of(long_document), dense_of(long_document, score)) < LIMIT


def test_the_papers_lengths() -> None:
    assert lengths_for((32 << 10) - 1) is None
    for tokens, kibi in ((32 << 10, (4, 1, 0.5)), (100_000, (16, 4, 2)), (10**7, (64, 8, 8))):
        assert lengths_for(tokens) == lengths(*(int(1024 * length) for length in kibi))
    for wrong in ({"block": 0}, {"block": 4, "anchor": 5}, {"block": 4, "passing": -1}):
        with pytest.raises(ConfigError):
            BlockLengths(**{"anchor": 0, "passing": 0, **wrong})


@pytest.mark.parametrize("cut", [lengths(256, 64, 32), star(256), lengths(2048, 0, 0)], ids=str)
def test_no_more_is_computed_than_the_definition_needs(
    make_model: Any, cut: BlockLengths, monkeypatch: Any, without_kernel: None
) -> None:
    """Projections of each token, and the visible pairs: the anchor once, in the last layer only keys and values."""
    monkeypatch.setattr("ragkv.attention.partial.flash_takes", lambda *_: False)  # torch counts only its own kernels
    model = make_model("llama-deep")
    layout = BlockLayout(tokens=1200, lengths=cut)
    long_document = LongDocument(model=model, layout=layout, ids=(7,) * 1200, compressor=KeyNorm())

    def flash(query: Any, key: Any, *more: Any, out_shape: Any = None, is_causal: bool = False, **_: Any) -> int:
        batch, heads, n, head_dim = query
        return batch * heads * n * key[2] * head_dim * (2 if is_causal or True in more else 4)

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: flash}) as counter:
        list(SequentialExecutor().run(long_document))
    spans = [len(layout.span(block)) for block in range(layout.blocks)]
    anchor = layout.anchor if layout.blocks > 1 else 0
    pairs = sum(n * (n / 2 + anchor * (block > 0) + layout.passing(block)) for block, n in enumerate(spans))
    shape, tokens = model.config, 1200 + anchor
    width = shape.num_attention_heads * shape.head_dim
    keys = 4 * shape.hidden_size * shape.num_key_value_heads * shape.head_dim
    token = 4 * shape.hidden_size * width + keys + 6 * shape.hidden_size * shape.intermediate_size
    needed = (shape.num_hidden_layers - 1) * (tokens * token + 4 * width * (pairs + anchor**2 / 2)) + tokens * keys
    assert counter.get_total_flops() == pytest.approx(needed, rel=0.03)
