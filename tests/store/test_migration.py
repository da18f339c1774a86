"""An older store gets its new tables whole or not at all, and stays readable meanwhile."""

from __future__ import annotations

import lzma
import os
import shutil
import signal
from pathlib import Path

import pytest
from storecheck import problems

from ragkv.store import Store
from ragkv.store.migration import FORMAT_VERSION, migrate
from ragkv.store.transaction import Transaction

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    with (
        lzma.open(FIXTURES / "store-v2" / "data.mdb.xz") as packed,
        (tmp_path / "store" / "data.mdb").open("wb") as data,
    ):
        shutil.copyfileobj(packed, data)
    return tmp_path


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_is_killed_in_it_leaves_the_old_format(old: Path, moment: str) -> None:
    def die(txn: Transaction) -> None:
        if moment == "after":
            migrate(txn)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if not pid:
        try:
            pytest.MonkeyPatch().setattr("ragkv.store.database.migrate", die)
            Store.open(old)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with Store.open(old, readonly=True) as store:
        stats = store.stats()
        assert stats.format_version == 2
        assert store.verify().ok
        orphans, models = set(store.orphans()), store.models()
    with Store.open(old) as store:
        assert problems(store) == []
        assert (set(store.orphans()), store.models()) == (orphans, models)
        now = store.stats()
        assert now.format_version == FORMAT_VERSION
        for name in (
            "documents",
            "chunks",
            "tokens",
            "kv_records",
            "kv_bytes",
            "kv_bytes_raw",
            "orphans",
            "unreadable",
        ):
            assert getattr(now, name) == getattr(stats, name)
        assert now.kv_bytes_by_encoding == stats.kv_bytes_by_encoding
        assert store.verify().ok


def test_garbage_of_an_old_store_is_found_without_the_list(old: Path) -> None:
    with Store.open(old, readonly=True) as store:
        before = store.collect(in_use=lambda _: True, dry_run=True)
    with Store.open(old) as store:
        assert store.collect(in_use=lambda _: True, dry_run=True) == before
        assert store.collect(in_use=lambda _: True).records == before.records == 1
        assert problems(store) == []
