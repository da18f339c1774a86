"""Shared tiers: anything but an exact match is a miss, and a failing tier delays requests only briefly.

Tests named after an issue reproduce bugs of other projects (docs/tiers.md).
"""

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from storekit import equal, identity, make_kv
from tiers import Proxy, RedisServer, S3Server

from ragkv.config import IndexConfig, TierConfig
from ragkv.errors import ConfigError
from ragkv.store import Int8, Raw, tier
from ragkv.store.tier import FAILURES, SharedTiers
from ragkv.types import KVShape

LONG = 600.0
"""Seconds: a limit that the test does not depend on."""


class Clock:
    """A clock that stands still until the test moves it."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def server():
    made = RedisServer("--enable-debug-command", "yes")
    yield made
    made.kill()


@pytest.fixture
def proxy(server):
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture
def connect(tmp_path):
    """Connects to a tier, by default one in a folder, with a manual clock."""
    opened = []

    def make(*urls, codec=None, clock=None, **settings):
        settings = {"timeout": 60.0, **settings}
        configs = [TierConfig(url=url or f"file://{tmp_path}/objects", **settings) for url in urls or (None,)]
        opened.append(SharedTiers(configs, codec or Raw(), clock or Clock()))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def s3(monkeypatch):
    kvs = S3Server()
    settings = {"ENDPOINT": f"http://127.0.0.1:{kvs.server_port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    yield kvs
    kvs.close()


def some(count=4, **more):
    made = [identity(number, number + 1, number + 2, **more) for number in range(1, count + 1)]
    return {one: make_kv(3, seed=one.chunk_ids[0], encoded_at=one.position) for one in made}


def put(shared, made):
    shared.offer(list(made.items()))
    assert shared.settle(LONG)


def use(shared):
    return shared.uses()[0]


def never_wrong(shared, made, **settings):
    """Fetch everything and compare it with what was written; returns the number of values found."""
    found = shared.fetch(made, **settings)
    assert all(equal(kv, made[one]) for one, (_, kv) in found.items())
    return len(found)


def test_a_read_while_the_tiers_are_closed_gives_what_was_asked_before(connect, monkeypatch):
    """As does a read for which the system starts no more threads: the rest is encoded."""
    shared, kvs = connect(), some()
    put(shared, kvs)
    threads = shared._tiers[0].threads
    submit, asked = threads.submit, []

    def closed(*work):
        if len(asked) == 2:
            raise RuntimeError("cannot schedule new futures after shutdown")
        asked.append(submit(*work))
        return asked[-1]

    monkeypatch.setattr(threads, "submit", closed)
    assert never_wrong(shared, kvs) == 2
    assert (use(shared)["hits"], use(shared)["skipped"]) == (2, 2)


@pytest.mark.parametrize(
    ("scheme", "part", "secret"),  # only values in Redis are split
    [
        ("redis", tier.PART_BYTES, ""),
        ("redis", 100, ""),
        ("redis", 100, "TIER_SECRET"),
        ("file", tier.PART_BYTES, "TIER_SECRET"),
        ("memory", tier.PART_BYTES, ""),
    ],
)
def test_what_is_written_is_read_back(connect, request, monkeypatch, scheme, part, secret):
    monkeypatch.setenv("TIER_SECRET", "a secret of many characters")
    monkeypatch.setattr(tier, "PART_BYTES", part)
    url = {"file": None, "memory": "memory://"}.get(scheme)
    if scheme == "redis":
        url = f"redis://127.0.0.1:{request.getfixturevalue('server').port}"
    shared, kvs = connect(url, secret=secret), some()
    assert never_wrong(shared, kvs) == 0
    put(shared, kvs)
    put(shared, kvs)  # existing values are not written again
    assert never_wrong(shared, kvs, shape=KVShape("bfloat16", make_kv(3).shape.layers)) == len(kvs)
    assert {name: use(shared)[name] for name in ("hits", "misses", "written", "failures", "damaged")} == {
        "hits": 4, "misses": 4, "written": 4, "failures": 0, "damaged": 0,
    }  # fmt: skip
    assert shared.check(kvs)[0] | {"url": ""} == {"url": "", "present": 4, "absent": 0, "damaged": [], "error": None}
    assert shared.delete([one.key() for one in kvs])
    assert never_wrong(shared, kvs) == 0
    if scheme == "redis":
        assert request.getfixturevalue("server").client.dbsize() == 0  # no part remains


OTHERS = {
    "model": ({}, {"model": "another"}),
    "prompt": ({}, {"prefix_ids": (7, 8)}),
    "tenant": ({"namespace": "another"}, {}),
    "secret": ({"secret": "OTHER_SECRET"}, {}),
    "plain": ({"secret": ""}, {}),
    "codec": ({"codec": Int8()}, {}),
}


@pytest.mark.parametrize("moved", [False, True], ids=["asked", "moved"])
@pytest.mark.parametrize("what", OTHERS)
def test_kv_of_another_model_schema_or_tenant_is_never_returned(connect, tmp_path, monkeypatch, what, moved):
    """Also LMCache PR#5210 and PR#5070, where the names of two models were merged, and values that were `moved` to the
    requested names.
    """
    monkeypatch.setenv("TIER_SECRET", "a secret of many characters")
    monkeypatch.setenv("OTHER_SECRET", "another secret of many characters")
    settings, changes = OTHERS[what]
    theirs, mine = connect(secret="TIER_SECRET"), connect(**{"secret": "TIER_SECRET", **settings})
    made, asked = some(), some(**changes)
    put(theirs, made)
    files = {path.name: path for path in (tmp_path / "objects").rglob("*") if path.is_file()}
    for other, one in zip(made, asked, strict=True) if moved else ():
        name = tmp_path / "objects" / mine._tiers[0].name(one.key())
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(files[other.key().hex()].read_bytes())
    assert mine.fetch(asked) == {}
    assert use(mine)["damaged" if moved else "misses"] == 4


def test_a_new_schema_reads_no_old_value(connect, monkeypatch):
    shared, made = connect(), some()
    put(shared, made)
    monkeypatch.setattr(tier, "SCHEMA_VERSION", 99)
    assert connect().fetch(made) == shared.fetch(made) == {}


def test_no_checksums_vllm_54363(connect, tmp_path):
    """Any flipped byte and any truncation is a miss, and the value is not fetched again."""
    shared, kvs = connect(), some(1)
    put(shared, kvs)
    [path] = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    whole = path.read_bytes()
    damages = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    damages += [whole[:at] for at in range(len(whole))] + [whole + b"\0"]
    item = shared._tiers[0]
    for damaged in damages:
        path.write_bytes(damaged)
        assert shared.fetch(kvs) == {}
        item.denied.clear()
        item.breaker.note(failed=False)
    assert use(shared)["damaged"] == len(damages)
    shared.fetch(kvs)
    path.write_bytes(whole)
    assert shared.fetch(kvs) == {}  # access denied
    assert connect().check(kvs)[0]["present"] == 1


def test_kv_layout_changed_under_the_cache_lmcache_4463_4247(connect):
    shared, made = connect(), some()
    put(shared, made)
    layers = make_kv(3, layers=2, kv_heads=4, head_dim=2).shape.layers
    assert shared.fetch(made, shape=KVShape("bfloat16", layers)) == {}
    assert use(shared)["damaged"] == 4


def test_a_failed_store_stays_visible_lmcache_4991(connect, server, monkeypatch):
    """One part is missing, as if the writer had crashed; then only other parts exist."""
    monkeypatch.setattr(tier, "PART_BYTES", 100)
    shared, kvs = connect(f"redis://127.0.0.1:{server.port}"), some()
    put(shared, kvs)
    server.client.delete(*(name for name in server.client.scan_iter() if name.endswith(b"/1")))
    assert shared.fetch(kvs) == {}
    server.client.delete(*(name for name in server.client.scan_iter() if name.count(b"/") == 5))
    again = connect(f"redis://127.0.0.1:{server.port}")
    put(again, kvs)
    assert never_wrong(again, kvs) == 4


def test_a_value_of_which_the_server_has_evicted_a_part_is_written_again(connect, server, monkeypatch):
    monkeypatch.setattr(tier, "PART_BYTES", 100)
    shared, kvs = connect(f"redis://127.0.0.1:{server.port}"), some()
    put(shared, kvs)
    server.client.delete(*(name for name in server.client.scan_iter() if name.endswith(b"/1")))
    assert never_wrong(shared, kvs) == 0
    put(shared, kvs)
    assert never_wrong(shared, kvs) == 4


def test_exists_is_cached_after_an_outside_delete_lmcache_4745(connect, server):
    shared, kvs = connect(f"redis://127.0.0.1:{server.port}"), some()
    for _ in range(2):
        put(shared, kvs)
        assert never_wrong(shared, kvs) == 4
        server.client.flushall()
        assert never_wrong(shared, kvs) == 0


class Held:
    """A tier that answers only when it is released."""

    def __init__(self, inner=None):
        self.go, self.inner, self.calls = threading.Event(), inner, 0

    def get(self, name):
        self.calls += 1
        assert self.go.wait(LONG)
        return None if self.inner is None else self.inner.get(name)

    def put(self, name, value):
        self.get(name)
        return self.inner is None or self.inner.put(name, value)

    def delete(self, names):
        self.inner.delete(names)

    def interrupt(self):
        return None


@pytest.mark.parametrize(("timeout", "rate"), [(0.01, 0.0), (60.0, 1e-4)], ids=["its own", "break-even"])
def test_deadlock_when_the_pool_is_full_lmcache_2942_2951_sglang_32455(connect, timeout, rate):
    """More requests than threads, to a tier that never answers: each returns at its deadline, which is the tier's or
    the time to encode the missing chunks. The tier works again later.
    """
    clock = Clock()
    shared, kvs = connect(timeout=timeout, clock=clock), some(tier.THREADS * 3)
    put(shared, kvs)
    held = shared._tiers[0].tier = Held(shared._tiers[0].tier)
    for _ in range(FAILURES):
        assert shared.fetch(kvs, seconds_per_token=rate) == {}
    assert use(shared)["late"] == FAILURES * len(kvs)
    assert use(shared)["open"]
    assert shared.fetch(kvs) == {}
    assert held.calls <= tier.THREADS * FAILURES
    held.go.set()
    clock.now += 1.0
    shared._tiers[0].config = TierConfig(url="memory://", timeout=60.0)
    assert never_wrong(shared, kvs) == len(kvs)


def test_the_circuit_breaker_never_closes_again_lmcache_s3():
    clock = Clock()
    breaker = tier.Breaker(clock)
    pauses = []
    for _ in range(FAILURES):
        assert breaker.allow()
        breaker.note(failed=True)
    for _ in range(9):
        assert not breaker.allow()
        start = clock.now
        while not breaker.allow():
            clock.now += 0.5
        assert not breaker.allow()  # one request tries, the others do not wait for it
        breaker.note(failed=True)
        pauses.append(clock.now - start)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    clock.now += 60
    assert breaker.allow()
    breaker.note(failed=False)
    assert breaker.allow()
    assert breaker.allow()


def test_memory_grows_with_a_slow_redis_lmcache_2017(connect, monkeypatch):
    """The queue of pending writes is bounded; further values are not written."""
    shared, kvs = connect(), some(8)
    size = next(iter(kvs.values())).nbytes
    monkeypatch.setattr(tier, "WAITING_BYTES", 2 * size)
    held = shared._tiers[0].tier = Held()
    for one in kvs.items():
        shared.offer([one])
    assert shared._waiting <= 3 * size
    assert use(shared)["skipped"] == 5
    held.go.set()
    assert shared.settle(LONG)
    assert use(shared)["written"] == 3


@pytest.mark.parametrize("url", ["s3://bucket/folder", "redis://127.0.0.1:1", "file:///dev/null/folder"])
def test_s3_does_not_start_and_uploads_assert_lmcache_1961_3376(connect, monkeypatch, url):
    """An unavailable tier is a clear error, or fails and is then left alone; nothing else happens."""
    for name, value in {"ENDPOINT": "http://127.0.0.1:1", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    kvs = some()
    if "null" in url:
        with pytest.raises(ConfigError, match=url):
            connect(url)
        return
    shared = connect(url)
    for _ in range(FAILURES):
        put(shared, kvs)
        assert shared.fetch(kvs) == {}
    assert use(shared)["failures"] >= FAILURES
    assert use(shared)["open"]
    assert not shared.delete([b"key"])


@pytest.mark.parametrize("fault", ["killed", "paused", "filled", "other data", "flipping", "stalled", "cut"])
def test_other_requests_kv_from_the_disk_tier_lmcache_4385_dynamo_14416_15079(connect, server, proxy, fault):
    """A real server with a fault: no wrong tensor, correct counts of loaded values, termination, and recovery."""
    clock, kvs = Clock(), some(6)
    url = f"redis://127.0.0.1:{proxy.port}"
    shared = connect(url, clock=clock, timeout=0.05 if fault in ("paused", "flipping", "stalled") else 60.0)
    with suppress(Exception):
        put(connect(f"redis://127.0.0.1:{server.port}"), kvs)
    names = [shared._tiers[0].name(one.key()) for one in kvs]
    match fault:
        case "killed":
            server.kill()
        case "paused":
            server.client.execute_command("CLIENT", "PAUSE", "100000000", "ALL")
        case "filled":
            server.client.config_set("maxmemory", "1")
        case "other data":
            values = [server.client.get(name) for name in names]
            for name, value in zip(names, values[1:] + values[:1], strict=True):
                server.client.set(name, value)
        case "flipping":
            proxy.flip = 97
        case "stalled":
            proxy.stalled.set()
        case "cut":
            for name in names:
                server.client.set(name, server.client.get(name)[:-1])
    for _ in range(FAILURES + 1):
        came = never_wrong(shared, kvs)
        assert came == 0 or fault == "filled"
        put(shared, some(9))
    counted = use(shared)
    assert counted["hits"] == (counted["read_bytes"] > 0) * 6 * (FAILURES + 1)
    assert counted["failures"] + counted["late"] + counted["damaged"] > 0
    assert counted["open"] or fault not in ("killed", "paused", "stalled")
    if fault in ("killed", "stalled", "flipping"):
        proxy.stalled.clear()
        proxy.flip = 0
        if fault == "killed":
            server.start()
        clock.now += 120
        shared._tiers[0].denied.clear()
        fresh = connect(url)
        put(fresh, kvs)
        assert never_wrong(fresh, kvs) == 6


@pytest.mark.parametrize(
    "fault",
    ["403", "500", "503", "resets", "truncates", "shortened", "flips", "stale", "a page", "hangs", "overwrites"],
)
def test_an_object_store_with_a_fault_gives_no_wrong_tensor(connect, s3, fault):
    """Errors, truncation, stale and swapped objects: each is a miss, and terminates and recovers."""
    clock, kvs = Clock(), some()
    shared = connect("s3://bucket/folder", clock=clock, timeout=0.05 if fault == "hangs" else 60.0)
    put(connect("s3://bucket/folder"), kvs)
    before = dict(s3.objects)
    assert len(before) == len(kvs)
    s3.fault = fault
    for _ in range(FAILURES):
        assert never_wrong(shared, kvs) == (4 if fault == "overwrites" else 0)
        shared._tiers[0].denied.clear()
    if fault == "hangs":
        s3.held.set()
    if fault not in ("overwrites", "403", "500", "503", "resets"):
        put(shared, kvs)
        assert s3.objects == before
    assert use(shared)["hits"] == (FAILURES * 4 if fault == "overwrites" else 0)
    assert use(shared)["open"] == (fault != "overwrites")
    s3.fault = ""
    clock.now += 120
    fresh = connect("s3://bucket/folder")
    assert never_wrong(fresh, kvs) == 4
    assert s3.objects == before
    assert fresh.delete([one.key() for one in kvs])
    assert s3.objects == {}


@pytest.mark.parametrize("fold", [str.lower, lambda name: name.replace("/", "_")], ids=["case", "folders"])
@pytest.mark.parametrize("what", OTHERS)
def test_a_store_without_case_or_folders_keeps_apart_what_differs(connect, monkeypatch, what, fold):
    """Two models, prompts, tenants, secrets or codecs: in such a store, ragkv's names collide only if equal. `moved`
    above tests values stored under another name.
    """
    monkeypatch.setenv("TIER_SECRET", "a secret of many characters")
    monkeypatch.setenv("OTHER_SECRET", "another secret of many characters")
    settings, changes = OTHERS[what]
    both = connect("memory://", secret="TIER_SECRET"), connect("memory://", **{"secret": "TIER_SECRET", **settings})
    values: dict[str, bytes] = {}

    class Folding(Held):
        def get(self, name):
            return values.get(fold(name))

        def put(self, name, value):
            return values.setdefault(fold(name), value) is value

    for item, kv in zip(both, (some(), some(**changes)), strict=True):
        item._tiers[0].tier = Folding()
        put(item, kv)
    for item, kv in zip(both, (some(), some(**changes)), strict=True):
        assert never_wrong(item, kv) == 4


def test_what_a_slower_tier_has_is_promoted_to_the_faster_ones(connect, tmp_path):
    folders = [f"file://{tmp_path}/{name}" for name in ("fast", "middle", "slow")]
    kvs = some()
    put(connect(folders[2]), kvs)
    shared = connect(*folders)
    assert never_wrong(shared, kvs) == 4
    assert shared.settle(LONG)
    assert [item["written"] for item in shared.uses()] == [4, 4, 0]
    for folder in folders[:2]:
        assert never_wrong(connect(folder), kvs) == 4
    assert never_wrong(shared, kvs) == 4
    assert [item["hits"] for item in shared.uses()] == [4, 0, 4]
    held = shared._tiers[0].tier = Held(shared._tiers[0].tier)
    shared.offer(list(some(5).items()))
    held.go.set()
    assert shared.delete([one.key() for one in some(5)])  # also what was still queued
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('url = "http://host"', "one of redis"),
        ('url = "file://relative"', "must be a URL"),
        ('url = "redis://["', "a host and a port"),
        ('url = "redis://host:99999"', "a host and a port"),
        ('url = "memory://"\nnamespace = "a/b"', "namespace"),
        ('url = "memory://"\nsecret = "A B"', "environment variable"),
        ('url = "memory://"\ntimeout = 0.0', "timeout"),
        ('url = "memory://"\ncolour = 1', "unknown key 'colour'"),
        ('namespace = "a"', "url"),
    ],
)
def test_wrong_settings_are_named(table, says):
    with pytest.raises(ConfigError, match=says):
        IndexConfig.from_toml(f"[[tiers]]\n{table}\n")


def test_an_option_of_a_url_that_is_none_is_named():
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=r"redis://host.*socket_timeout"):
        tier.RedisTier("redis://:password@host?socket_timeout=soon", timeout=1.0)


def test_settings_are_kept():
    config = IndexConfig(tiers=[{"url": "redis://h", "ttl": 60}, {"url": "file:///x"}])
    assert IndexConfig.from_toml(config.to_toml()) == config
    with pytest.raises(ConfigError, match="tables"):
        IndexConfig.from_toml('tiers = ["redis://h"]')


def test_a_secret_that_is_not_set_is_named(connect, monkeypatch):
    monkeypatch.delenv("TIER_SECRET", raising=False)
    with pytest.raises(ConfigError, match="TIER_SECRET"):
        connect("redis://user:password@host", secret="TIER_SECRET")
    assert tier.shown("redis://user:password@host/1") == "redis://host/1"
    assert not Path("objects").exists()
