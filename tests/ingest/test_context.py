"""The `context` encoding: what chunks see of their document, exactly, and that stale KV is never read."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ragkv import RagKV
from ragkv.benchmarks.evaluation.answers import IndexSource, TaskSource, all_candidates
from ragkv.benchmarks.evaluation.metrics import Example
from ragkv.config import EncodingConfig, IndexConfig
from ragkv.doctor.specs import Spec
from ragkv.engines import make_engine, require_supported
from ragkv.errors import ConfigError, CorruptStoreError, UnsupportedModelError, UsageError
from ragkv.index.create import _fitting
from ragkv.index.maintenance import IndexRepairSource
from ragkv.ingest import ReadyChunk, ReadyDocument, encode_identities
from ragkv.ingest.encoding import LINE_TOKENS, seen_before
from ragkv.runtime import Stream
from ragkv.store.tables import chunk_key, digest, pack_chunk
from ragkv.types import Capability, Chunk, Document, Encoding, ScoredChunk

TEXT = "".join(
    f"Company {n} makes valves in town {n}. It was founded by its owner in {1900 + n}.\n\n" for n in range(4)
)
QUESTION = "Who founded it?"


def created(folder: Path, model: object, *, context: int, chunk_tokens: int = 96, **settings) -> RagKV:
    """An index with exact KV, for comparison with transformers."""
    settings = {"engines": ("ape",), "codec": "raw", **settings}
    return RagKV.create(
        folder,
        model=str(model),
        device="cpu",
        chunk_tokens=chunk_tokens,
        encoding=EncodingConfig(context=context),
        **settings,
    )


def scored(rag: RagKV, name: str) -> list[ScoredChunk]:
    """All chunks of a document, in order."""
    [stored] = [each for each in rag.store.documents() if each.document.source == name]
    return [
        ScoredChunk(chunk=chunk, source=name, retrieval_score=1.0, rerank_score=None, score=0.5)
        for chunk in rag.store.chunks(stored.document.document_id)
    ]


def keys(rag: RagKV, name: str) -> dict[str, bytes]:
    """For each chunk text of a document, the key of the KV that a question reads."""
    chunks = [each.chunk for each in scored(rag, name)]
    found = rag.kv_source.identities(Encoding.CONTEXT, chunks)
    return {chunk.text: identity.key() for chunk, identity in zip(chunks, found, strict=True)}


def dense(rag: RagKV, ids: tuple[int, ...], count: int):
    """transformers' keys and values `(kv_heads, count, head_dim)` of the last tokens."""
    with rag.model.plain() as plain:
        cache = plain(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
    return [(layer.keys[0, :, -count:], layer.values[0, :, -count:]) for layer in cache.layers]


def same(one, other, tolerance=5e-5):  # the order of sums differs between processors; with AMX, a key differs by 1.1e-5
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def first_scores(rag: RagKV, engine, chunks: list[ScoredChunk]):
    request, _ = rag.request(engine, QUESTION, chunks)
    return Stream(rag.index.runtime, engine, request).scores.clone()


def over(rag: RagKV, chunks: list[ScoredChunk]):
    """The question's logits by full attention."""
    return first_scores(rag, make_engine("full", {}), chunks)


# ---- the tokens


@pytest.fixture(scope="module")
def prompt(model_folder, tmp_path_factory):
    with RagKV.create(tmp_path_factory.mktemp("prompt") / "index", model=str(model_folder), device="cpu") as rag:
        yield rag.index.prompt, rag.model.tokens


def chunks_of(prompt, *spans: tuple[int, str], heading: str | None = None) -> list[Chunk]:
    words, tokens = prompt
    return [
        Chunk(
            chunk_id=f"c{at}",
            document_id="d",
            ordinal=at,
            text=text,
            token_ids=words.chunk_ids(tokens, text),
            start=start,
            end=start + len(text),
            heading=heading,
        )
        for at, (start, text) in enumerate(spans)
    ]


def seen(prompt, chunks: list[Chunk], window: int, title: str | None = None) -> str:
    words, tokens = prompt
    return tokens.decode(seen_before(chunks[-1], chunks[-2::-1], title, window, words, tokens))


def test_the_window_is_the_last_tokens_before_the_chunk(prompt):
    one, two, three = (0, "First."), (8, "Second."), (17, "Third.")
    chunks = chunks_of(prompt, one, two, three)
    whole = "First.\n\nSecond.\n\n"
    assert [seen(prompt, chunks, size) for size in (1, 9, 12, len(whole), 1000)] == [
        "\n",
        "Second.\n\n",
        ".\n\nSecond.\n\n"[-12:],
        whole,
        whole,
    ]
    assert seen(prompt, chunks[:1], 1000) == ""


def test_what_two_chunks_share_is_seen_once(prompt):
    """Given chunks may overlap or contain each other."""
    text = "One two three four five."
    chunks = chunks_of(prompt, (0, text[:13]), (4, text[4:18]), (8, text[8:13]), (8, text[8:]))
    assert seen(prompt, chunks, 1000) == text[:8]
    assert seen(prompt, chunks[:2], 1000) == text[:4]
    assert seen(prompt, chunks[:3], 3) == text[5:8]


def test_the_line_names_what_stands_in_no_text_that_is_seen(prompt):
    spans = (0, "Valves. Made here."), (20, "It is old.")
    title = "Bolt Ltd"
    assert seen(prompt, chunks_of(prompt, *spans, heading="Bolt Ltd > Works"), 4, title) == (
        "Bolt Ltd > Works\n\n" + "re.\n\n"[-4:]
    )
    assert seen(prompt, chunks_of(prompt, *spans, heading="Valves > Works"), 1000, title) == (
        "Bolt Ltd > Works\n\nValves. Made here.\n\n"
    )
    assert seen(prompt, chunks_of(prompt, *spans, heading="Valves"), 1000, "Valves") == "Valves. Made here.\n\n"
    assert seen(prompt, chunks_of(prompt, spans[0], heading="Valves"), 5, title) == "Bolt Ltd\n\n"
    assert len(seen(prompt, chunks_of(prompt, *spans), 4, "long " * 200)) == LINE_TOKENS + 4


# ---- the numbers


@pytest.mark.parametrize("context", [1, 40, 250])
def test_stored_kv_is_that_of_one_plain_pass(tmp_path, model_folder, context):
    """Over prefix, title line, window and chunk; only the chunk's own rows are stored."""
    (tmp_path / "works.md").write_text("# Old Works\n\n" + TEXT)
    with created(tmp_path / "index", model_folder, context=context) as rag:
        rag.ingest(tmp_path / "works.md")
        chunks = scored(rag, "works.md")
        words, tokens = rag.index.prompt, rag.model.tokens
        for at, each in enumerate(chunks):
            before = tuple(i for other in chunks[:at] for i in other.chunk.token_ids)
            cut = len(before) > context
            line = words.chunk_ids(tokens, "Old Works") if cut else ()
            ids = (*rag.index.prefix_ids, *line, *before[-context:])
            [identity] = rag.kv_source.identities(Encoding.CONTEXT, [each.chunk])
            assert identity.prefix_ids == ids
            assert identity.encoding is (Encoding.CONTEXT if at else Encoding.PREFIXED)
            kv = rag.store.get_kv(identity)
            assert kv.encoded_at == len(ids)
            for layer, (key, value) in enumerate(dense(rag, ids + each.chunk.token_ids, kv.tokens)):
                same(kv.keys[layer], key)
                same(kv.values[layer], value)


def test_a_document_in_its_order_is_full_attention(tmp_path, model_folder):
    """If the window reaches back to the document's start; with a shorter window it is not."""
    (tmp_path / "works.txt").write_text(TEXT)
    found = {}
    for context in (0, 40, 250):
        with created(tmp_path / str(context), model_folder, context=context) as rag:
            rag.ingest(tmp_path / "works.txt")
            chunks = scored(rag, "works.txt")
            assert len(chunks) > 1
            block = make_engine("block", {"block": {"over": "prefixed"}}, context=context)
            found[context] = first_scores(rag, block, chunks)
            full = over(rag, chunks)
            blend = {"blend": {"over": "prefixed", "select": "random", "ratio": 1.0}}
            same(first_scores(rag, make_engine("blend", blend, context=context), chunks[1:]), over(rag, chunks[1:]))
    same(found[250], full)
    assert (found[40] - full).abs().max() > 1e-3
    assert (found[0] - full).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["ape", "pced"])
def test_engines_read_it_in_place_of_prefixed_kv(tmp_path, model_folder, engine):
    """One chunk right after the prefix: as if its keys had been rotated to there, and a plain model went on."""
    from ragkv.attention.kv import PlacedChunk
    from ragkv.attention.sequence import join

    (tmp_path / "works.txt").write_text(TEXT)
    tuning = {"pced": {"beta": 0.0, "gamma": 0.0}}
    with created(tmp_path / "index", model_folder, context=60, tuning=tuning) as rag:
        rag.ingest(tmp_path / "works.txt")
        chunk = scored(rag, "works.txt")[2]
        made = make_engine(engine, tuning, context=60)
        request, use = rag.request(made, QUESTION, [chunk])
        assert (use.hits, use.misses) == (1, 0)
        kv = request.chunks[0].kv
        assert kv.encoded_at == len(request.prefix_ids) + 60
        at = len(request.prefix_ids)
        placed = (PlacedChunk(kv=request.prefix, start=0), PlacedChunk(kv=kv, start=at))
        cache = rag.model.cache(join(placed, rag.model.rotary))
        with rag.model.plain() as plain:
            expected = plain(input_ids=torch.tensor([request.suffix_ids]), past_key_values=cache).logits[0, -1]
        same(first_scores(rag, made, [chunk]), expected.float(), 1e-4)


# ---- the index


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """Records the encoded chunks: how many tokens of its document each one sees."""
    from ragkv.index import kv_source, maintenance
    from ragkv.ingest import ingester

    made: list[int] = []

    def counting(model, identities, prefix):
        made.extend(len(identity.prefix_ids) for identity in identities)
        return encode_identities(model, identities, prefix)

    for module in (kv_source, maintenance, ingester):
        monkeypatch.setattr(module, "encode_identities", counting)
    return made


def test_an_edit_encodes_only_the_chunks_that_saw_it(tmp_path, model_folder, counted):
    """Chunks of 30 tokens with a window of 40: the edited chunk and the next two."""
    words = [f"Part {n} is about town number {n}." for n in range(10, 18)]

    def document(name: str, parts: list[str]) -> ReadyDocument:
        starts = [sum(len(part) + 1 for part in parts[:at]) for at in range(len(parts))]
        return ReadyDocument(
            document=Document(document_id=name, source=name, content_hash=str(hash(tuple(parts)))),
            text=" ".join(parts),
            chunks=[
                ReadyChunk(chunk_id=f"{name}-{at}", start=start, text=part)
                for at, (start, part) in enumerate(zip(starts, parts, strict=True))
            ],
        )

    with created(tmp_path / "index", model_folder, context=40) as rag:
        assert rag.add_chunks([document("a", words)]).kv_encoded == len(words)
        before = keys(rag, "a")
        edited = [*words[:3], "Part 13 is about something else.", *words[4:]]
        report = rag.add_chunks([document("a", edited)])
        assert (report.kv_encoded, report.kv_reused) == (3, len(words) - 3)
        after = keys(rag, "a")
        assert [text for text in edited if before.get(text) != after[text]] == edited[3:6]
        assert rag.store.stats().kv_records == len(words)  # the old version's KV is deleted with it
        # the same text elsewhere sees other tokens, except at the start of a document
        report = rag.add_chunks([document("b", words[:1] + words[2:4])])
        assert (report.kv_encoded, report.kv_reused) == (2, 1)
        assert len(set(keys(rag, "b").values()) - set(keys(rag, "a").values())) == 2
        del counted[:]
        for name in ("a", "b"):
            _, use = rag.request(make_engine("ape", {}, context=40), QUESTION, scored(rag, name))
            assert use.misses == 0
        assert not counted
        assert rag.maintenance.verify().ok


def test_missing_kv_is_made_with_what_its_chunk_saw(tmp_path, model_folder, counted):
    """By a question, by warm and by repair: the same KV as by an ingest, and `gc` finds nothing to delete."""
    (tmp_path / "works.md").write_text("# Old Works\n\n" + TEXT)
    with created(tmp_path / "whole", model_folder, context=40, chunk_tokens=64) as rag:
        rag.ingest(tmp_path / "works.md")
        chunks = [each.chunk for each in scored(rag, "works.md")]
        identities = rag.kv_source.identities(Encoding.CONTEXT, chunks)
        expected = {identity: rag.store.get_kv(identity) for identity in identities}
        rag.query(QUESTION, engine="ape", max_new_tokens=1)  # stores the prefix
        rag.maintenance.settle()
        assert rag.store.stats().kv_bytes_by_encoding.keys() == {"context", "prefixed", "standalone"}

        damaged = identities[2].key()
        rag.store._live().write(lambda txn: txn.delete("segments", damaged + (0).to_bytes(4, "big")))
        assert not rag.maintenance.verify().ok
        made = rag.maintenance.repair()
        assert (made.ok, made.encoded, made.dropped_records) == (True, 1, 0)
        same(rag.store.get_kv(identities[2]).keys, expected[identities[2]].keys)

    with created(tmp_path / "later", model_folder, context=40, chunk_tokens=64, kv="on-demand") as rag:
        report = rag.ingest(tmp_path / "works.md")
        assert (report.kv_encoded, report.kv_later) == (0, len(chunks))
        del counted[:]
        asked = scored(rag, "works.md")[1:3]
        for misses in (2, 0):
            answer = rag.query(QUESTION, engine="pced", chunks=asked, max_new_tokens=1)
            assert answer.kv.misses == misses
            rag.maintenance.settle()
        assert len(counted) == 2
        wanted = rag.maintenance.wanted(documents=["works.md"])
        assert wanted.keys() == expected.keys()
        report = rag.maintenance.warm(wanted)
        assert (report.present, report.encoded) == (2, len(chunks) - 2)
        used = rag.maintenance.wanted(most=2)
        assert used.keys() == set(identities[1:3])
        for identity, kv in expected.items():
            found = rag.store.get_kv(identity)
            assert found.encoded_at == identity.position
            same(found.keys, kv.keys)
            same(found.values, kv.values)
        assert rag.maintenance.gc().records == 0
        assert rag.maintenance.verify().ok
        assert rag.maintenance.backup(tmp_path / "copy", verify=True).verified


def test_a_changed_setting_is_encoded_anew_and_never_read_stale(tmp_path, model_folder):
    """As after a change of the prompt, each question encodes what it needs until the next ingest."""
    source = tmp_path / "works.txt"
    source.write_text(TEXT)
    index = tmp_path / "index"
    with RagKV.create(index, model=str(model_folder), device="cpu", chunk_tokens=64, engines=("ape",)) as rag:
        rag.ingest(source)
        plain = (index / "ragkv.toml").read_text()
        old = {identity for identity, _ in rag.maintenance.wanted(documents=["works.txt"]).items()}
    assert "encoding" not in plain
    (index / "ragkv.toml").write_text(plain + "\n[encoding]\ncontext = 40\n")
    with RagKV.open(index, device="cpu") as rag:
        asked = scored(rag, "works.txt")
        answer = rag.query(QUESTION, engine="ape", chunks=asked[:3], max_new_tokens=1)
        assert (answer.kv.hits, answer.kv.misses) == (1, 2)  # the first chunk sees only the prefix in either case
        rag.maintenance.settle()
        report = rag.ingest(source)
        assert (report.updated, report.kv_encoded, report.kv_reused) == ([str(source)], len(asked) - 3, 3)
        assert len(old & rag.maintenance.wanted(documents=["works.txt"]).keys()) == 1
        assert rag.ingest(source).unchanged == [str(source)]
        # an engine without the index's setting reads prefixed KV
        request, use = rag.request(make_engine("ape", {}), QUESTION, asked[:3])
        assert use.misses == 2
        assert {chunk.kv.encoded_at for chunk in request.chunks} == {len(request.prefix_ids)}


def test_text_that_is_not_from_the_index_sees_the_prefix_alone(tmp_path, model_folder):
    (tmp_path / "works.txt").write_text(TEXT)
    with created(tmp_path / "index", model_folder, context=40) as rag:
        rag.ingest(tmp_path / "works.txt")
        [_, chunk, *_] = scored(rag, "works.txt")
        own = rag.chunk("It lies in Tarn.", chunk_id="mine")
        renamed = rag.chunk("It lies in Varn.", chunk_id=chunk.chunk.chunk_id)  # the id of a chunk with other text
        found = rag.kv_source.identities(Encoding.CONTEXT, [own, chunk.chunk, renamed])
        assert [identity.encoding.value for identity in found] == ["prefixed", "context", "prefixed"]
        assert found[2].prefix_ids == rag.index.prefix_ids


def test_what_is_evaluated_is_what_the_index_reads(tmp_path, model_folder):
    """The stored KV, without encoding; without the setting, KV of chunks that saw only the prefix."""
    (tmp_path / "works.txt").write_text(TEXT)
    with created(tmp_path / "index", model_folder, context=40, chunk_tokens=64) as rag:
        rag.ingest(tmp_path / "works.txt")
        rag.query(QUESTION, engine="ape", max_new_tokens=1)
        rag.maintenance.settle()
        source = IndexSource(rag)
        example = Example(example_id="1", question=QUESTION, chunks=(), answers=())
        chosen = source.candidate("ape", top_k=3)
        places = {}
        [plain] = all_candidates(
            [Spec("ape", {"context": 0})], models=[chosen.model], retrievals=["bm25"], top_k=3, context=40
        )
        assert plain.label == "ape(context=0)"
        with pytest.raises(UsageError, match=r"leave context out, or use --index"):
            TaskSource().check(chosen)
        with pytest.raises(UsageError, match="saw 40 tokens of their document, not 8; ingest into another index"):
            source.check(replace(chosen, context=8))
        for one in (chosen, plain, source.candidate("full", top_k=3)):
            source.check(one)
            backend, task = source.ask(one, example)
            reads = backend.plan(task.engine, backend.find(task, lambda _: None)[::-1])
            request, _ = backend.request(task, reads, None, [])
            places[one.engine, one.context] = [kv and kv.encoded_at for kv in (chunk.kv for chunk in request.chunks)]
        found = [each.chunk for each in reversed(rag.retrieve(QUESTION, top_k=3))]
        expected = rag.kv_source.identities(Encoding.CONTEXT, found)
        prefix = len(rag.index.prefix_ids)
        assert places["ape", 40] == [identity.position for identity in expected] != [prefix] * 3
        assert places["ape", 0] == [prefix] * 3
        assert places["full", 40] == [None] * 3
        assert rag.store.has_many(expected) == set(expected)


# ---- refusals


def test_a_model_that_cannot_move_chunks_is_refused_by_name(tmp_path):
    model = SimpleNamespace(
        missing_capabilities={Capability.MOVE: "its positions are fixed"}, checkpoint=SimpleNamespace(name="m")
    )
    require_supported(make_engine("ape", {}), model)
    for name in ("ape", "pced"):
        with pytest.raises(
            UnsupportedModelError, match=f"'{name}' cannot run on model 'm': its .* use engine 'full', or set context"
        ):
            require_supported(make_engine(name, {}, context=1), model)
    require_supported(make_engine("full", {}, context=1), model)
    with pytest.raises(UnsupportedModelError, match=r"'block' cannot run .*; use engine 'full'"):
        require_supported(make_engine("block", {}, context=1), model)
    assert make_engine("apb", {}, context=1).reads is Encoding.PREFIXED
    with pytest.raises(UnsupportedModelError, match=r"context = 8 does not fit model 'm': its .*; leave it out"):
        _fitting(IndexConfig(encoding=EncodingConfig(context=8)), {}, model)


def test_tokens_that_the_model_lacks_are_refused_before_they_are_encoded(tmp_path, model_folder):
    """An index may be untrusted: the text before a requested chunk is checked too."""
    (tmp_path / "works.txt").write_text(TEXT)
    with created(tmp_path / "index", model_folder, context=40, chunk_tokens=64, kv="on-demand") as rag:
        rag.ingest(tmp_path / "works.txt")
        first, second, *_ = [each.chunk for each in scored(rag, "works.txt")]
        key = chunk_key(digest(first.document_id), first.ordinal)
        rag.store._live().write(lambda txn: txn.put("chunks", key, pack_chunk(replace(first, token_ids=(5, 10**6)))))
        with pytest.raises(CorruptStoreError, match=r"the text before chunk .* tokens that its model does not have"):
            rag.kv_source.identities(Encoding.CONTEXT, [second])
        source = IndexRepairSource(rag.index, rag.kv_source)
        assert source.identities(second) == []


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("context = -1", "context must be from 0 to 65536"),
        ("context = 65537", "context must be from 0 to 65536"),
        ('context = "all"', "context must be a whole number, not 'all'"),
        ("window = 3", "unknown key 'window'; known are context"),
    ],
)
def test_a_wrong_setting_is_refused(table, reason):
    with pytest.raises(ConfigError, match=reason):
        IndexConfig.from_toml(f"[encoding]\n{table}\n")
    assert "encoding" not in IndexConfig().to_toml()
    config = IndexConfig(encoding=EncodingConfig(context=7))
    assert IndexConfig.from_toml(config.to_toml()) == config


def test_a_window_that_the_model_has_no_positions_for_is_refused(tmp_path, model_folder):
    (tmp_path / "works.txt").write_text(TEXT)
    with (
        created(tmp_path / "index", model_folder, context=4000) as rag,
        pytest.raises(ConfigError, match=r"context = 4000 makes chunks .* has 512; lower it by \d+"),
    ):
        rag.ingest(tmp_path / "works.txt")
    assert not list(tmp_path.glob("index/derived/*"))
