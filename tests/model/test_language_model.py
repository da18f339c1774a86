"""For every family, results from cached, moved chunks equal transformers' results from the whole text."""

import pytest
import torch

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import ArenaKVCache, KVArena, TokenSequence
from ragkv.errors import UsageError
from ragkv.model import language_model
from ragkv.model.self_check import check_model
from ragkv.types import LayerShape

PARTS = [5, 9, 3, 14, 6]  # prefix, three chunks, question; the test models' windows are 8 tokens


def sequence(seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in PARTS]


def starts() -> list[int]:
    return [sum(PARTS[:i]) for i in range(len(PARTS))]


def question_logits(model, parts, placed):
    return model.step([TokenSequence.over(placed, position=sum(PARTS[:-1]))], [parts[-1]], every=True)


def test_context_and_own_tokens_equal_full_attention(family, make_model):
    """`tests/engines/test_engines.py` compares engines on several chunks, also in bfloat16."""
    model = make_model(family)
    parts = sequence()
    ids = [i for part in parts for i in part]
    [whole] = model.encode([ids[: -PARTS[-1]]])
    found = question_logits(model, parts, [PlacedChunk(kv=whole, start=0)])
    with model.plain() as plain:
        right = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -PARTS[-1] :]
    torch.testing.assert_close(found, right, atol=1e-5 * float(right.abs().max()), rtol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_rows_of_one_step_equal_those_rows_alone(unlike_family, make_model):
    """A long prefill, a short one elsewhere, one token after own tokens, and one token without any context."""
    model = make_model(unlike_family)
    parts = sequence()
    kvs = model.encode(parts[:-1])
    placed = tuple(PlacedChunk(kv=kv, start=start) for kv, start in zip(kvs, starts(), strict=False))
    ids = [[*parts[3], *parts[4]], parts[1], [parts[2][0]], parts[4]]

    def rows():
        before = TokenSequence((), 0)
        model.step([before], [parts[3]])
        return [
            TokenSequence.over(placed[:3], position=starts()[3]),
            TokenSequence.over(placed[1:2], position=40),
            before,
            TokenSequence((), 17),
        ]

    together = rows()
    found = model.step(together, ids, every=True).split([len(each) for each in ids])
    last = model.step(together, [[9], [8, 7], [6], [5, 4, 3]])
    for index, row in enumerate(rows()):
        alone = model.step([row], [ids[index]], every=True)
        torch.testing.assert_close(found[index], alone, atol=1e-5 * float(alone.abs().max()), rtol=1e-5)
        again = model.step([row], [[[9], [8, 7], [6], [5, 4, 3]][index]])
        torch.testing.assert_close(last[index : index + 1], again, atol=1e-5 * float(again.abs().max()), rtol=1e-5)
        assert (together[index].position, together[index].cache.length) == (row.position, row.cache.length)


@pytest.mark.usefixtures("kernels")
def test_rows_in_a_slab_equal_those_rows_alone(unlike_family, make_model):
    """Their own tokens share an arena: rows join, differ in length, skip a step, outgrow their slot and leave."""
    model = make_model(unlike_family)
    ids = [i for part in sequence() for i in part]
    slabs = KVArena()
    together = [TokenSequence((), at, slabs.place(10, 60, 5)) for at in (0, 5, 40, 2, 7)]
    alone = [TokenSequence((), row.position) for row in together]
    assert sum(isinstance(row.cache, ArenaKVCache) for row in together) == 5
    lengths = [20, 9, 3, 14, 1]

    def same(rows, asked):
        found = model.step([together[i] for i in rows], asked)
        for index, i in enumerate(rows):
            [expected] = model.step([alone[i]], [asked[index]])
            torch.testing.assert_close(found[index], expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)

    same(range(5), [ids[:n] for n in lengths])
    for step in range(6):
        rows = [i for i in range(5) if (i + step) % 4]
        same(rows, [[ids[(i + step) % len(ids)]] * (3 if (i, step) == (2, 5) else 1) for i in rows])
    same(range(5), [ids * 4 if i == 1 else [7] for i in range(5)])  # more than the arena has room for
    same(range(5), [[8]] * 5)
    for row, other in zip(together, alone, strict=True):
        assert (row.cache.length, row.position) == (other.cache.length, other.position)
    cut = together[1].cache.chunk_kv()
    torch.testing.assert_close(cut.values[0], alone[1].cache.chunk_kv().values[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [63, 64])
def test_a_chunk_cut_from_a_slab_is_its_own_memory(tokens, make_model):
    """Also if it fills its slot completely, next to the following row."""
    model = make_model("llama")
    slabs = KVArena()
    rows = [TokenSequence((), 0, slabs.place(tokens, 0, 2)) for _ in range(2)]
    model.step(rows, [[5] * tokens, [6] * tokens])
    kv = rows[0].cache.chunk_kv()
    kept = [key.clone() for key in kv.keys]
    del rows[0]
    rows.append(TokenSequence((), 0, slabs.place(tokens, 0, 2)))
    model.step(rows[1:], [[9] * tokens])
    assert all(torch.equal(key, before) for key, before in zip(kv.keys, kept, strict=True))


def test_a_pass_that_fails_appends_nothing(make_model, monkeypatch):
    model = make_model("llama")
    ids = [i for part in sequence() for i in part]
    row, other = TokenSequence((), 0), TokenSequence((), 0)
    for each in (row, other):
        model.step([each], [ids[:20]])
    mlp = model.module.get_decoder().layers[1].mlp

    def fail(*_):
        raise RuntimeError("no memory left")

    with monkeypatch.context() as fault:
        fault.setattr(mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="no memory left"):
            model.step([row], [ids[20:25]])
    assert (row.position, row.cache.length) == (20, 20)
    assert torch.equal(model.step([row], [ids[20:]]), model.step([other], [ids[20:]]))


def test_chunks_of_one_step_equal_one_by_one(make_model, monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(language_model, "ENCODE_TOKENS", 14)
    chunks = [[5] * 3, [7, 1, 2, 9], [4] * 11, [6]]  # 1 is the eos token, 2 the pad token: in text they have no effect
    together = model.encode(chunks)
    for ids, kv in zip(chunks, together, strict=True):
        [alone] = model.encode([ids])
        assert kv.tokens == len(ids)
        for a, b in zip((*kv.keys, *kv.values), (*alone.keys, *alone.values), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_chunks_of_one_step_hold_no_more_tokens_than_told(make_model, steps_of, monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(language_model, "ENCODE_TOKENS", 14)
    steps = steps_of(model)
    model.encode([[5] * n for n in (3, 4, 11, 1, 20, 2)])
    assert [[len(each) for each in ids] for _, ids in steps] == [[3, 4], [11, 1], [20], [2]]
    with pytest.raises(ValueError, match="without tokens"):
        model.encode([[5], []])


def test_one_chunk_kv_serves_two_places_and_is_not_changed(make_model):
    model = make_model("llama-yarn")
    parts = sequence()
    kvs = model.encode(parts[:-1])
    before = [k.clone() for k in kvs[1].keys]
    first = question_logits(model, parts, [PlacedChunk(kv=kvs[1], start=0), PlacedChunk(kv=kvs[2], start=30)])
    question_logits(model, parts, [PlacedChunk(kv=kvs[1], start=12)])
    again = question_logits(model, parts, [PlacedChunk(kv=kvs[1], start=0), PlacedChunk(kv=kvs[2], start=30)])
    assert torch.equal(first, again)
    for a, b in zip(before, kvs[1].keys, strict=True):
        assert torch.equal(a, b)


def test_prompts_beyond_the_positions_are_refused(make_model):
    model = make_model("llama")
    model.require_positions(512)
    with pytest.raises(UsageError, match="lower --top-k"):
        model.require_positions(513)


SHARED = {4: 2, 5: 3, 6: 2, 7: 3}


@pytest.fixture(scope="module")
def sharing(make_model):
    return make_model("gemma3n")


def test_they_are_found_by_what_they_read(sharing, make_model):
    assert sharing.shared == SHARED
    check_model(sharing)
    assert sharing.shared == SHARED
    assert make_model("llama").shared == {}


def test_they_keep_nothing_and_have_no_layers_in_transformers_cache(sharing):
    [kv] = sharing.encode([[5, 6, 7]])
    assert kv.shape.layers == (LayerShape(2, 16, 16),) * 4 + (LayerShape(0, 0, 0),) * 4
    assert kv.nbytes == 3 * 4 * 2 * 32 * 4 == kv.shape.nbytes(3)
    assert [key.shape[1] for key in kv.keys] == [3] * 8
    assert [layer.keys.shape[1] for layer in sharing.cache(kv).layers] == [2] * 4


def test_an_encoding_ends_at_the_last_layer_that_keeps_anything(sharing):
    seen = []
    sharing.step([TokenSequence.for_kv((), position=0)], [[5, 6, 7]], seen=seen)
    assert [one.layer for one in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize("slabs", [False, True])
def test_own_tokens_are_kept_once_wherever_they_lie(sharing, slabs):
    """For a single row and for rows in one arena, prefilled at once and token by token."""
    rows = [TokenSequence((), 0), TokenSequence((), 0)]
    if slabs:
        places = KVArena()
        for row in rows:
            row.cache = places.place(8, 8, 2)
    ids = [[9, 8, 7, 6], [5, 6, 7]]
    sharing.step(rows, [each[:-1] for each in ids])
    found = sharing.step(rows, [each[-1:] for each in ids])
    for row, each, logits in zip(rows, ids, found, strict=True):
        whole = TokenSequence((), 0)
        torch.testing.assert_close(logits, sharing.step([whole], [each])[0], atol=1e-4, rtol=1e-4)
        made, expected = row.cache.chunk_kv(), whole.cache.chunk_kv()
        assert made.shape == expected.shape == sharing.kv_shape
        for a, b in zip(made.tensors, expected.tensors, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
