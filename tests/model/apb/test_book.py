"""APB's blocks against its definition, and what they are equal to in special cases (fp32, tiny random models)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from densebook import DenseBook, dense_logits
from torch import Tensor
from transformers import DynamicCache

from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.row import Row
from ragkv.model.apb import Book, KeyNorm, Layout, Lengths, Random, Sequential, star
from ragkv.model.apb.book import question_score
from ragkv.model.apb.compressor import Compressor, Local

LIMIT = 3e-5
SHAPES = ("llama", "qwen3", "gemma3")
PREFIX = (0, 45, 46, 47, 48)
QUESTION = (90, 91, 92, 93, 94, 95, 96)


def drawn(n: int, seed: int = 3) -> tuple[int, ...]:
    return tuple(torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def lengths(block: int, anchor: int, passing: int) -> Lengths:
    return Lengths(block=block, anchor=anchor, passing=passing)


def book_of(
    model: Any,
    ids: tuple[int, ...],
    cut: Lengths,
    compressor: Compressor | None = None,
    *,
    prefix: Sequence[int] = PREFIX,
    asked: tuple[int, ...] = (),
) -> Book:
    kv = model.encode([prefix])[0] if prefix else None
    layout = Layout(tokens=len(ids), lengths=cut, start=len(prefix), question=len(asked))
    return Book(model=model, layout=layout, ids=ids, compressor=compressor or KeyNorm(), prefix=kv, question_ids=asked)


def answered(book: Book, kvs: Sequence[ChunkKV]) -> Tensor:
    """Logits of the question after the document's blocks."""
    seen = [] if book.prefix is None else [Segment(kv=book.prefix, start=0)]
    seen += [Segment(kv=kv, start=kv.encoded_at) for kv in kvs]
    logits: Tensor = book.model.step([Row.over(seen, position=book.layout.end)], [QUESTION], every=True)
    return logits


def logits_of(book: Book) -> Tensor:
    return answered(book, [block.kv for block in Sequential().run(book)])


def full_logits(book: Book) -> Tensor:
    """The same question by transformers itself, on the whole prompt."""
    head = () if book.prefix is None else PREFIX
    ids = torch.tensor([[*head, *book.ids, *QUESTION]])
    with book.model.plain() as plain:
        found: Tensor = plain(input_ids=ids, use_cache=False).logits[0, -len(QUESTION) :].float()
    return found


def dense_of(book: Book, score: Any) -> Tensor:
    layout = book.layout
    blocks = [len(layout.span(block)) for block in range(layout.blocks)]
    anchor = (*book.question_ids, *book.ids[: layout.anchor_head])
    dense = DenseBook(
        layout.start, len(anchor), layout.anchor_head, blocks, len(QUESTION), layout.lengths.passing, score
    )
    head = () if book.prefix is None else PREFIX
    return dense_logits(book.model, dense, [*head, *anchor, *book.ids, *QUESTION], len(QUESTION))


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def by_key_norm(layer: int, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    return -key.float().norm(dim=-1)


def by_random(layer: int, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    local = Local(
        layer=layer, position=first, query=query, key=key, value=value, scale=1.0, unturned=lambda: (query, key)
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
    # Qwen3 and Gemma 3 give all keys of a head one norm, but for rounding
    compressor, score = (KeyNorm(), by_key_norm) if family == "llama" else (Random(seed=5), by_random)
    book = book_of(make_model(family), drawn(n), sizes, compressor)
    expected = dense_of(book, score)
    assert off(logits_of(book), expected) < LIMIT
    if cut != "star":
        assert off(expected, full_logits(book)) > 10 * LIMIT  # the cut is felt: no test of plain attention


@pytest.mark.parametrize("family", SHAPES)
def test_a_question_in_the_anchor(make_model: Any, family: str) -> None:
    book = book_of(make_model(family), drawn(70), lengths(20, 6, 4), Random(seed=5), asked=QUESTION)
    found = logits_of(book)
    assert off(found, dense_of(book, by_random)) < LIMIT
    without = book_of(book.model, book.ids, lengths(20, 6, 4), Random(seed=5))
    assert off(found, logits_of(without)) > 10 * LIMIT


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family",
    ["gemma2", "cohere2", "smollm3", "phi4-partial", "llama-yarn", "qwen2-tied-sliding", "gpt-oss"],
)
def test_other_families(make_model: Any, family: str) -> None:
    book = book_of(make_model(family), drawn(75), lengths(20, 6, 4), Random(seed=5), asked=QUESTION)
    assert off(logits_of(book), dense_of(book, by_random)) < 1e-4


@pytest.mark.parametrize("family", ["gemma3n", "deepseek3"])
def test_layers_without_keys_of_their_own_and_latent_ones(make_model: Any, family: str) -> None:
    book = book_of(make_model(family), drawn(60), lengths(20, 0, 20))
    assert off(logits_of(book), full_logits(book)) < 1e-4


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
        book = book_of(make_model(family), drawn(n), sizes, prefix=prefix)
        assert off(logits_of(book), full_logits(book)) < LIMIT


def test_without_the_exclusion_it_is_not_full_attention(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    book = book_of(make_model("llama"), drawn(60), lengths(16, 6, 16))
    monkeypatch.setattr(Layout, "candidates", lambda self, block: range(len(self.span(block))))
    assert off(logits_of(book), full_logits(book)) > 0.05


@pytest.mark.parametrize("family", SHAPES)
def test_star_is_transformers_with_a_cache(make_model: Any, family: str) -> None:
    model, ids = make_model(family), drawn(70)
    book = book_of(model, ids, star(24), prefix=())
    blocks = list(Sequential().run(book))
    with model.plain() as plain:
        for number, block in enumerate(blocks):
            span = book.layout.span(number)
            cache = DynamicCache()  # one that knows the configuration would forget what is out of the window
            if number:
                plain(input_ids=torch.tensor([ids[:24]]), past_key_values=cache, use_cache=True)
            at = torch.arange(span.start, span.stop)
            mask = _star_mask(plain, len(span), 24 if number else 0, span.start)
            plain(
                input_ids=torch.tensor([ids[span.start : span.stop]]),
                position_ids=at[None],
                past_key_values=cache,
                use_cache=True,
                attention_mask=mask,
            )
            for layer in range(model.layers):
                made = cache.layers[layer].keys[0, :, -len(span) :]
                assert off(block.kv.keys[layer], made) < LIMIT


def _star_mask(plain: Any, n: int, anchor: int, start: int) -> Any:
    """What transformers is told where its own count of positions would be wrong: of places, for windows."""
    kinds = set(getattr(plain.config, "layer_types", None) or ["full_attention"])
    query = torch.arange(start, start + n)
    key = torch.cat([torch.arange(anchor), query])
    order = torch.arange(anchor + n)
    causal = order <= torch.arange(anchor, anchor + n)[:, None]
    window = query[:, None] - key < (getattr(plain.config, "sliding_window", None) or 1 << 30)
    made = {
        kind: torch.zeros(1, 1, n, anchor + n).masked_fill(
            ~(causal & window if kind == "sliding_attention" else causal), torch.finfo(torch.float32).min
        )
        for kind in kinds
    }
    return made if len(made) > 1 else next(iter(made.values()))


def test_appending_encodes_the_new_block_alone(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model("gemma3"), drawn(80)
    whole = list(Sequential().run(book_of(model, ids, lengths(20, 6, 4))))
    before = dict(enumerate(Sequential().run(book_of(model, ids[:60], lengths(20, 6, 4)))))
    ran: list[int] = []
    encode = Book.encode
    monkeypatch.setattr(Book, "encode", lambda self, block, *rest: ran.append(block) or encode(self, block, *rest))
    after = list(Sequential().run(book_of(model, ids, lengths(20, 6, 4)), before))
    assert ran == [3]
    for old, new in zip(whole, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old.kv.tensors, new.kv.tensors, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(old.chosen, new.chosen, strict=True))


def test_a_question_chooses_what_is_passed_on(make_model: Any) -> None:
    """The labels that retaining heads learn, worked out from the model's own projections."""
    model, ids = make_model("llama"), drawn(60)
    prefix = model.encode([PREFIX])[0]
    asking = question_score(model, QUESTION, prefix, position=len(PREFIX) + 60)
    first = model.module.model.layers[0]
    cos, sin = model.module.model.rotary_emb(torch.zeros(1), torch.arange(65, 65 + len(QUESTION))[None])
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    with torch.inference_mode():
        states = first.input_layernorm(model.module.model.embed_tokens(torch.tensor([QUESTION])))
        query = first.self_attn.q_proj(states).unflatten(-1, (4, 16)).transpose(1, 2)
        expected, _ = apply_rotary_pos_emb(query, query, cos, sin)
    assert off(asking.queries[0], expected[0]) < 1e-4
    book = book_of(model, ids, lengths(20, 6, 4), asking, asked=QUESTION)

    def score(layer: int, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        wanted = torch.zeros(key.shape[:2])
        for head in range(key.shape[0]):
            of_group = asking.queries[layer][2 * head : 2 * head + 2].flatten(0, 1)
            wanted[head] = (key[head] @ of_group.T).amax(-1) * 16**-0.5
        return wanted

    assert off(logits_of(book), dense_of(book, score)) < LIMIT
