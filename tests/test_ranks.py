"""APB's blocks on several ranks are those of one process, bit for bit; a rank that ends or differs is reported."""

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from longbook import LENGTHS, book, tiny_model

from ragkv.errors import RanksError, UsageError
from ragkv.model.apb.compressors import KeyNorm, Random
from ragkv.model.apb.document import (
    BlockLayout,
    BlockLengths,
    LongDocument,
    SequentialExecutor,
    query_aware_compressor,
)
from ragkv.ranks import RankExecutor, RankGroup, meeting_place

WAIT = 600.0
PREFIX = (0, 45, 46, 47, 48)
QUESTION_IDS = (90, 91, 92, 93)
IDS = tuple(torch.randint(3, 259, (75,), generator=torch.Generator().manual_seed(3)).tolist())
CUT = BlockLengths(block=20, anchor=6, passing=4)  # four blocks, the last of 15 tokens


def on_ranks(size, work, *, timeout=WAIT):
    """The results of `work` on ranks in threads, which are real gloo groups; or the first error."""
    store = dist.HashStore()

    def run(rank):
        return work(RankGroup(store, rank, size, timeout=timeout, device=torch.device("cpu")))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def document_of(model, cut=CUT, ids=IDS, compressor=None, question=()):
    layout = BlockLayout(tokens=len(ids), lengths=cut, start=len(PREFIX), question=len(question))
    compressor = compressor or (KeyNorm() if model.checkpoint.name == "llama" else Random(seed=5))
    prefix = model.encode([PREFIX])[0]
    return LongDocument(
        model=model, layout=layout, ids=ids, compressor=compressor, prefix=prefix, question_ids=question
    )


def compare_blocks(document, size, monkeypatch):
    """Which blocks were encoded by `size` ranks, after they were compared with those of one process."""
    oracle = list(SequentialExecutor().run(document))
    encoded, encode = [], LongDocument.encode
    with monkeypatch.context() as patch:
        patch.setattr(LongDocument, "encode", lambda self, h, *rest: encoded.append(h) or encode(self, h, *rest))
        first, *others = on_ranks(size, lambda group: list(RankExecutor(group).run(document)))
    assert others == [[]] * (size - 1)
    assert len(first) == len(oracle)
    for block, wanted in zip(first, oracle, strict=True):
        assert block.kv.encoded_at == wanted.kv.encoded_at
        assert block.kv.shape == wanted.kv.shape
        assert all(map(torch.equal, block.kv.tensors, wanted.kv.tensors))
    assert sorted(encoded) == list(range(document.layout.blocks))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("size", [2, 3])  # an even number of blocks, and a last round of one block
def test_blocks_on_ranks_are_those_of_one_process(make_model, monkeypatch, family, size):
    compare_blocks(document_of(make_model(family)), size, monkeypatch)


def test_blocks_that_know_the_question(make_model, monkeypatch):
    model = make_model("llama")
    prefix = model.encode([PREFIX])[0]
    compressor = query_aware_compressor(model, QUESTION_IDS, prefix, position=len(PREFIX) + len(IDS))
    compare_blocks(document_of(model, compressor=compressor, question=QUESTION_IDS), 2, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "mistral-sliding", "deepseek3"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("cut", "tokens"),
    [
        (CUT, 61),  # one token in the last block
        (CUT, 20),  # one block: only the first rank has work
        (BlockLengths(block=20, anchor=6, passing=18), 47),  # a block passes on what it has
        (BlockLengths(block=16, anchor=16, passing=5), 75),  # block 0 passes nothing on
        (BlockLengths(block=16, anchor=16, passing=0), 75),  # Star
    ],
)
def test_blocks_of_any_cut_on_any_ranks(make_model, monkeypatch, family, size, cut, tokens):
    compare_blocks(document_of(make_model(family), cut, IDS[:tokens]), size, monkeypatch)


def test_only_what_blocks_pass_on_is_gathered(make_model, monkeypatch):
    document, sent, gather = document_of(make_model("llama")), [0, 0], RankGroup.gather

    def counted(group, mine):
        sent[group.rank] += mine.nbytes
        return gather(group, mine)

    monkeypatch.setattr(RankGroup, "gather", counted)
    on_ranks(2, lambda group: list(RankExecutor(group).run(document)))
    assert sent == [2 * document.model.kv_shape.token_bytes * CUT.passing] * 2  # two rounds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
def test_tensors_arrive_as_they_are(dtype):
    def work(group):
        mine = torch.arange(6).view(2, 3).t().to(dtype) + group.rank
        gathered, nothing = group.gather(mine), group.gather(mine[:0])
        if group.rank:
            group.send_to_first(mine)
            return gathered, nothing, mine
        return gathered, nothing, group.receive(1, torch.empty((3, 2), dtype=dtype))

    (gathered, nothing, received), (other, _, sent) = on_ranks(2, work)
    assert torch.equal(gathered, torch.stack([sent - 1, sent]))
    assert torch.equal(other, gathered)
    assert torch.equal(received, sent)
    assert nothing.shape == (2, 0, 2)


def test_ranks_that_differ_all_say_in_what():
    def work(group):
        group.require_same({"model": "a", "text": "b"})
        with pytest.raises(RanksError, match="Rank 2 has another text than rank 0") as error:
            group.require_same({"model": "a", "text": "c" if group.rank == 2 else "b"})
        return str(error.value)

    assert len(set(on_ranks(3, work))) == 1


def test_a_rank_that_is_missing_is_not_waited_for_longer_than_the_timeout():
    def work(group):
        if group.rank == 0:
            with pytest.raises(RanksError, match=r"Another rank has ended, .* longer than 2 seconds"):
                group.gather(torch.zeros(1))
        return group  # rank 1 stays connected and does nothing

    on_ranks(2, work, timeout=2)


def test_ranks_that_cannot_meet(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="Start the ranks with torchrun"):
        meeting_place(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        for rank in "01":
            monkeypatch.setenv("RANK", rank)
            with pytest.raises(RanksError, match="The ranks have not met within 1 seconds"):
                meeting_place(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("book")
    tiny_model(folder / "model", model_folder)
    (folder / "book.txt").write_text(book(30))
    return folder


def command(folder, *program, text="book.txt"):
    tokens = ",".join(map(str, LENGTHS.values()))
    words = [*program, f"What is after {book(1, 6)}?", "--context", text, "--model", "model", "--json", "--quiet"]
    return subprocess.run(
        [sys.executable, "-m", *words, "--block-tokens", tokens, "--max-new-tokens", "4"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ragkv.cli.ranks")


@pytest.mark.slow
def test_two_processes_answer_as_one(folder):
    one = command(folder, "ragkv", "query", "--engine", "apb")
    assert one.returncode == 0, one.stderr
    two = command(folder, *TORCHRUN)
    assert two.returncode == 0, two.stderr
    answers = [json.loads(each.stdout) for each in (one, two)]
    assert answers[0]["answer"] == answers[1]["answer"]
    assert answers[1]["engine"] == "apb"


@pytest.mark.nightly
def test_a_file_that_is_missing_is_one_sentence(folder):
    made = command(folder, *TORCHRUN, text="other.txt")
    assert (made.returncode, made.stdout) == (1, "")
    assert "other.txt" in made.stderr
    assert "ragkv/cli" not in made.stderr
