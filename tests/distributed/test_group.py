"""Ranks whose store ends with rank 0, as without torchrun: each still gets the error, or learns that no question
follows.
"""

import gc
import socket
import threading
from datetime import timedelta
from operator import call
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rankthreads import WAIT, in_threads

from ragkv.config import IndexConfig
from ragkv.distributed import group
from ragkv.distributed.group import BoundedStore, Handshake, Peers, require_alike
from ragkv.distributed.session import Session, meeting_place, settings_to_compare
from ragkv.errors import RanksError
from ragkv.runtime import RuntimeLimits


class Store:
    """A store that calls a function before a certain key is checked."""

    def __init__(self, store, word, before):
        self._store, self._word, self._before = store, word, before

    def check(self, keys):
        if any(self._word in key for key in keys):
            self._before()
        return self._store.check(keys)

    def __getattr__(self, name):
        return getattr(self._store, name)


def serving():
    """A store that ends when it is freed, and its port."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=WAIT), wait_for_workers=False)
    return [store], store.port


def client(port):
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=WAIT), wait_for_workers=False)


def messages_as_the_store_ends(size, handshakes, *, timeout, begin=lambda port: None):
    """What the two ranks say that meet; the store ends with the first, before the second looks. `begin(port)` runs
    before the first.
    """
    held, port = serving()
    message, others_turn = {}, threading.Event()

    def meet(store, rank):
        try:
            Peers.meet(store, rank, size, handshakes[rank], timeout=timeout)
        except RanksError as error:  # not by `pytest.raises`, which would keep the store
            message[rank] = str(error)

    def first():
        begin(port)
        meet(Store(held.pop(), "read/1", others_turn.set), 0)
        gc.collect()
        others_turn.set()  # the first rank and its store have ended

    def second():
        meet(Store(client(port), "hello/0", lambda: others_turn.wait(WAIT)), 1)

    in_threads(call, (first, second))
    return message[0], message[1]


def test_every_rank_names_the_difference_before_the_store_ends():
    both = [Handshake(same={"model": model}) for model in "ab"]
    first, second = messages_as_the_store_ends(2, both, timeout=WAIT)
    assert "has another model than rank 0: b, not a" in first
    assert second == first


def test_every_rank_names_who_did_not_come_before_the_store_ends():
    first, second = messages_as_the_store_ends(
        3, [Handshake(same={})] * 2, timeout=0, begin=lambda port: client(port).wait(["hello/1"])
    )
    assert "Of 3 ranks, this one did not come within 0 seconds: 2." in first
    assert second == first


def test_a_store_that_hangs_is_given_up():
    hangs = threading.Event()
    peers = Peers(BoundedStore(SimpleNamespace(add=lambda *_: hangs.wait(WAIT)), 0.01), 1, [Handshake(same={})] * 2)
    try:
        with pytest.raises(RuntimeError, match=r"has not answered within 0\.01 seconds") as caught:
            peers.check()
        assert str(peers.after_failure(caught.value)).startswith("The store where the ranks meet cannot be reached")
        peers.leave(WAIT)
    finally:
        hangs.set()


def test_a_port_of_another_process_is_no_meeting_place(monkeypatch):
    with socket.create_server(("", 0)) as silent:
        port = str(silent.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(RanksError, match=f"No process answers at 127.0.0.1:{port}, where the ranks meet"):
            meeting_place(0.2)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(RanksError, match=f"Port {port} is in use by another process"):
            meeting_place(WAIT)


def test_nobody_waits_for_a_rank_that_has_read_the_difference():
    store = dist.HashStore()

    def rank(number):
        with pytest.raises(RanksError, match="has another model"):
            Peers.meet(store, number, 2, Handshake(same={"model": str(number)}), timeout=WAIT)

    in_threads(rank, (0, 1))
    assert store.check(["read/0", "read/1"])


def test_why_the_rank_with_the_store_leaves_is_learnt_before_the_store_ends():
    held, port = serving()
    handshakes = [Handshake(same={}), Handshake(same={})]
    others_turn, message = threading.Event(), []

    def first():
        peers = Peers(Store(held.pop(), "left/1", others_turn.set), 0, handshakes)
        peers.notify("its disk is full.")
        peers.leave(WAIT)
        del peers
        gc.collect()
        others_turn.set()

    def second():
        peers = Peers(Store(client(port), "notice/0", lambda: others_turn.wait(WAIT)), 1, handshakes)
        try:
            while True:
                peers.check()
        except RanksError as error:
            message.append(str(error))
        peers.leave(WAIT)

    in_threads(call, (first, second))
    assert message[0].startswith("Rank 0 (")
    assert message[0].endswith(" gave up: its disk is full.")


def test_ranks_that_do_not_report_are_named(monkeypatch):
    monkeypatch.setattr(group, "_GRACE", 0.0)
    store = dist.HashStore()
    peers = [
        Peers(store, rank, [Handshake(same={}, host=f"m{each}", process=each) for each in range(3)]) for rank in (0, 1)
    ]
    error = RuntimeError("gone")
    both = "Rank 1 (m1, process 1), rank 2 (m2, process 2) have ended, cannot be reached or are not where"
    assert str(peers[0].after_failure(error)).startswith(both)
    assert str(peers[1].after_failure(error)).startswith(
        "Rank 2 (m2, process 2) has ended, cannot be reached or is not"
    )
    store.set("here/2", "")
    assert "cannot speak to each other any more (gone)" in str(peers[0].after_failure(error))
    with pytest.raises(RanksError):
        peers[1].check()


class Part:
    """The part of a backend that ranks need to meet."""

    config = IndexConfig(model="m")
    model = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, **limits):
        self.limits = RuntimeLimits(**limits)

    def facts(self):
        return {}

    def backend(self, group, runtime):
        return None


def test_the_end_is_learnt_before_the_store_ends(monkeypatch):
    agreed = []
    monkeypatch.setattr("ragkv.distributed.session.Runtime", lambda model, **limits: agreed.append(limits))
    held, port = serving()
    others_turn, asked = threading.Event(), []
    leave = Peers.leave

    def leaves(peers, timeout):
        others_turn.set()
        leave(peers, timeout)

    monkeypatch.setattr(Peers, "leave", leaves)

    def first():
        session = Session(
            Part(batch_tokens=7, max_rows=3, own_tokens=50), held.pop(), 0, 2, timeout=WAIT, patience=WAIT
        )
        session.join()
        session.notify({"question": "q"})
        session.notify({"end": True})
        session.leave()
        del session
        gc.collect()
        others_turn.set()

    def second():
        session = Session(
            Part(batch_tokens=9, max_rows=2, own_tokens=60), client(port), 1, 2, timeout=WAIT, patience=WAIT
        )
        session.join()
        others_turn.wait(WAIT)
        try:
            asked[:] = [session.next(), session.next()]
        finally:
            session.leave()

    in_threads(call, (first, second))
    assert asked == [{"question": "q"}, {"end": True}]
    for limits in agreed:  # the minimum of all ranks' limits, so that all take the same steps
        assert (limits["batch_tokens"], limits["max_rows"], limits["own_tokens"]) == (7, 2, 50)


def test_what_ranks_must_have_alike_and_what_may_differ():
    def facts(**settings):
        return settings_to_compare(IndexConfig(model="m", **settings))

    same = facts()
    for own in ({"codec": "zstd"}, {"kv_budget": "1GB"}, {"chunk_tokens": 77}, {"kv": "on-demand"}):
        assert facts(**own) == same
    for other in (
        {"tuning": {"ape": {"temperature": 0.5}}},
        {"top_k": 3},
        {"rerank": False},
        {"default_engine": "ape"},
    ):
        handshakes = [Handshake(same=same), Handshake(same=same), Handshake(same=facts(**other), host="far", process=7)]
        with pytest.raises(
            RanksError, match=rf"^Rank 2 \(far, process 7\) has another setting {next(iter(other))} than rank 0"
        ):
            require_alike(handshakes)
    with pytest.raises(RanksError, match=r"^Rank 1 \(.* has another ragkv than rank 0: 0\.0\.1, not "):
        require_alike([Handshake(same=same), Handshake(same=same, version="0.0.1")])
    with pytest.raises(RanksError, match="has another text than rank 0: t, not none"):
        require_alike([Handshake(same={}), Handshake(same={"text": "t"})])
    require_alike([Handshake(same=same), Handshake(same=same, host="elsewhere", process=7)])
