"""Tiers that several machines share: chunk KV in Redis or Valkey, or in an object store, behind memory and LMDB.

The order is memory, LMDB, the tiers of `[[tiers]]` in `ragkv.toml`, encode (docs/tiers.md). A value is one sealed
object: the record's manifest, which holds the token ids and everything else that the numbers depend on, its segments,
and a digest over all of it and over its own name. So it cannot be another chunk's, model's or tenant's, and anything
doubtful is a miss: the chunk is encoded, and its KV is stored in LMDB as usual for KV on demand.

No answer waits for a tier longer than encoding the missing chunks would take. A tier that fails three times is not used
for a second, then for two, four and at last sixty, and is used again after one success (`Breaker`). Values are written
after the answer and never overwritten.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import xxhash

from ragkv.config import TierConfig
from ragkv.errors import ConfigError, StoreError, extra
from ragkv.store.codecs import Buffer, Codec, DamagedError
from ragkv.store.documents import matching, require_shape
from ragkv.store.record import SCHEMA_VERSION, EncodedRecord, KVIdentity, decode_record, encode_record
from ragkv.types import KVShape

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV

logger = logging.getLogger(__name__)

REDIS = ("redis", "rediss", "unix")
PART_BYTES = 8 << 20
"""The longest value in Redis; a larger object is cut into parts of this size."""
MOST_PARTS = 4096
THREADS = 8
"""Requests to one tier at a time: single GETs on several connections are faster than one MGET."""
TRANSFER_SECONDS = 10.0
"""The longest transfer that no answer waits for: a write, and the rest of a read after its deadline."""
WAITING_BYTES = 256 << 20
"""The most KV that may wait to be written; the excess is not written, so that a slow tier does not fill the memory."""
FAILURES = 3
LONGEST_PAUSE = 60.0
MOST_DENIED = 4096

_MAGIC = b"RKVT"
_HEAD = struct.Struct("<4sHHQ16s")
_MANIFEST = struct.Struct("<I")
_PLAIN, _ENCRYPTED = 0, 1
_NONCE = 12


class Tier(Protocol):
    """A key-value store on other machines. Any exception is a failure of the tier, and counts as a miss."""

    def get(self, name: str) -> bytes | None:
        """The value of a name, None if there is none."""

    def put(self, name: str, value: bytes) -> bool:
        """Write a value unless the name has one; whether it was written."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete these names, whether they exist or not."""

    def interrupt(self) -> None:
        """End the requests in flight, so that their threads are free."""


class RedisTier:
    """Redis or Valkey, by redis-py. `ttl` is in seconds; 0 leaves the eviction to the server (`allkeys-lru`).

    A value beyond `PART_BYTES` is cut, and the names of its further parts hold its digest, so that the parts of two
    writers are never mixed. The first part is written last.
    """

    def __init__(self, url: str, *, timeout: float, ttl: int = 0) -> None:
        with extra("A redis:// tier needs redis", "tiers"):
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        self._ttl = ttl or None
        self._client: Any
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=max(timeout, 0.05),
                socket_connect_timeout=max(timeout, 0.05),
                retry=Retry(NoBackoff(), 0),  # the default retries for 4 to 9 seconds
                protocol=2,  # the push messages of RESP3 are not needed
                max_connections=THREADS + 2,
            )
        except ValueError as error:  # one of the URL's own options
            raise ConfigError(f"The tier {shown(url)} cannot be used ({error}).") from error

    def get(self, name: str) -> bytes | None:
        value: bytes | None = self._client.get(name)
        if value is None:
            return None
        parts = [value]
        for part in _further_parts(name, value):
            more = self._client.get(part)
            if not more:
                return None
            parts.append(more)
        return b"".join(parts)

    def put(self, name: str, value: bytes) -> bool:
        head = self._client.getrange(name, 0, _HEAD.size - 1)
        if head:  # avoids the transfer; SET NX decides
            parts = _further_parts(name, head)
            if not parts or self._client.exists(*parts) == len(parts):
                return False
            self._client.delete(name)  # the server has evicted a part, so it could never be read again
        for start in reversed(range(0, len(value), PART_BYTES)):
            part = memoryview(value)[start : start + PART_BYTES]
            key = _part(name, value, start // PART_BYTES) if start else name
            done = self._client.set(key, part, nx=True, ex=self._ttl)
        return bool(done)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            head = self._client.getrange(name, 0, _HEAD.size - 1)
            self._client.delete(name, *_further_parts(name, head))

    def interrupt(self) -> None:
        self._client.connection_pool.disconnect()


def _further_parts(name: str, value: Buffer) -> list[str]:
    """The names of a value's further parts, by its first bytes."""
    length = _HEAD.unpack_from(value)[3] if len(value) >= _HEAD.size else 0
    return [_part(name, value, part) for part in range(1, min(-(-(_HEAD.size + length) // PART_BYTES), MOST_PARTS))]


def _part(name: str, value: Buffer, part: int) -> str:
    return f"{name}/{bytes(value[16:32]).hex()}/{part}"


class ObjectTier:
    """An object store by obstore: `s3://`, `gs://`, `az://`, `file://` or `memory://`, with its usual credentials."""

    def __init__(self, url: str, *, timeout: float) -> None:
        with extra("A tier in an object store needs obstore", "tiers"):
            import obstore
            from obstore import store
        self._obstore = obstore
        parts = urlsplit(url)
        options: Any = {"timeout": f"{TRANSFER_SECONDS:g}s", "connect_timeout": f"{timeout:g}s", "allow_http": True}
        self._store: Any
        try:
            if parts.scheme == "file":
                self._store = store.LocalStore(prefix=parts.path, mkdir=True)
            elif parts.scheme == "memory":
                self._store = store.MemoryStore()
            else:
                self._store = store.from_url(url, client_options=options, retry_config={"max_retries": 0})
        except Exception as error:
            raise ConfigError(f"The tier {shown(url)} cannot be used ({error}).") from error

    def get(self, name: str) -> bytes | None:
        from obstore.exceptions import NotFoundError

        try:
            value = self._obstore.get(self._store, name)
            return bytes(value.bytes())
        except (NotFoundError, FileNotFoundError):
            return None

    def reader(self, name: str) -> Callable[[int], bytes]:
        """A function that reads the next bytes of an object. FileNotFoundError if there is none; StoreError if it
        cannot be read."""
        from obstore.exceptions import BaseError, NotFoundError

        def failed(error: Exception) -> StoreError:
            return StoreError(f"{name} cannot be read from its store ({str(error).splitlines()[0]})")

        try:  # in parts, each of which has the whole time of a transfer
            file = self._obstore.open_reader(self._store, name, buffer_size=PART_BYTES)
        except NotFoundError as error:
            raise FileNotFoundError(name) from error
        except BaseError as error:
            raise failed(error) from error

        def read(size: int) -> bytes:
            try:
                return bytes(file.read(size))
            except (BaseError, OSError) as error:
                raise failed(error) from error

        return read

    def put(self, name: str, value: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            self._obstore.put(self._store, name, value, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        from obstore.exceptions import NotFoundError

        for name in names:
            with suppress(NotFoundError, FileNotFoundError):
                self._obstore.delete(self._store, name)

    def interrupt(self) -> None:
        """Nothing to do: its requests end by themselves, after `TRANSFER_SECONDS`."""


def shown(url: str) -> str:
    """A URL without its user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class Breaker:
    """A circuit breaker: after `FAILURES` failures it blocks for 1, 2, 4 … 60 s, each time followed by one trial."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._pause = 1.0
        self._trying = False

    @property
    def open(self) -> bool:
        """Whether it blocks requests, except a trial."""
        return self._failures >= FAILURES

    def allow(self) -> bool:
        """Whether to send a request now; the caller must report its outcome by `note`."""
        with self._lock:
            if not self.open:
                return True
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def note(self, *, failed: bool) -> bool:
        """Report a request's outcome; returns whether it opened the breaker."""
        with self._lock:
            if not failed:
                self._failures, self._pause, self._trying = 0, 1.0, False
                return False
            self._failures += 1
            opened = self._failures == FAILURES
            if self.open and (opened or self._trying):
                self._pause = 1.0 if opened else min(2 * self._pause, LONGEST_PAUSE)
                self._until = self._clock() + self._pause
            self._trying = False
            return opened


@dataclass(slots=True, kw_only=True)
class TierUse:
    """A tier's counters since this process opened the index, in chunks.

    `failures` are requests that raised, `late` ones that took longer than encoding would, `damaged` values that did not
    match the request, `skipped` values that were not read or written because the tier had failed before or was slow.
    """

    hits: int = 0
    misses: int = 0
    failures: int = 0
    late: int = 0
    damaged: int = 0
    written: int = 0
    skipped: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class _Connected:
    """One tier with its names, its breaker, its counters and its threads."""

    def __init__(self, config: TierConfig, codec: Codec, clock: Callable[[], float]) -> None:
        self.config, self.url = config, shown(config.url)
        self.use, self.breaker = TierUse(), Breaker(clock)
        self.writes = Breaker(clock)
        """A separate breaker, because a full tier can still be read."""
        self.secret = _secret(config)
        space = config.namespace
        if self.secret is not None:  # so that names reveal nothing
            space = hmac.new(self.secret, f"namespace {space}".encode(), hashlib.sha256).hexdigest()[:32]
        self._codec = codec
        facts = json.dumps(codec.config(), sort_keys=True)
        lossy = hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()
        self._prefix = f"ragkv/{SCHEMA_VERSION}/{space}/{lossy}"
        self.denied: OrderedDict[str, None] = OrderedDict()
        self.tier: Tier = (
            RedisTier(config.url, timeout=config.timeout, ttl=config.ttl)
            if urlsplit(config.url).scheme in REDIS
            else ObjectTier(config.url, timeout=config.timeout)
        )
        self.threads = ThreadPoolExecutor(THREADS, "ragkv-tier")

    def name(self, key: bytes) -> str:
        return f"{self._prefix}/{key[:1].hex()}/{key.hex()}"

    def seal(self, record: EncodedRecord) -> bytes:
        body = b"".join((_MANIFEST.pack(len(record.manifest)), record.manifest, *record.segments))
        name, kind = self.name(record.key), _PLAIN
        if self.secret is not None:
            nonce, kind = os.urandom(_NONCE), _ENCRYPTED
            body = nonce + _cipher(self.secret).encrypt(nonce, body, name.encode())
        return _HEAD.pack(_MAGIC, SCHEMA_VERSION, kind, len(body), _digest(name, body)) + body

    def unseal(self, value: Buffer, identity: KVIdentity, shape: KVShape | None) -> tuple[EncodedRecord, ChunkKV]:
        """The record in a value and its tensors; `DamagedError` unless it is exactly what was asked for."""
        name, view = self.name(identity.key()), memoryview(value)
        if len(view) < _HEAD.size:
            raise DamagedError("it is shorter than its head")
        magic, schema, kind, length, digest = _HEAD.unpack_from(view)
        body: Buffer = view[_HEAD.size :]
        wanted = _PLAIN if self.secret is None else _ENCRYPTED
        if (magic, schema, kind, length) != (_MAGIC, SCHEMA_VERSION, wanted, len(body)):
            raise DamagedError("it is not a value of this version and length")
        if digest != _digest(name, body):
            raise DamagedError("its digest does not match")
        if self.secret is not None:
            body = memoryview(_decrypted(self.secret, body, name))
        if len(body) < _MANIFEST.size:
            raise DamagedError("it has no manifest")
        start = _MANIFEST.size + _MANIFEST.unpack_from(body)[0]
        packed = bytes(body[_MANIFEST.size : start])
        manifest = matching(packed, identity)
        require_shape(None, manifest, shape)
        if manifest.codec != self._codec.suited(manifest.dtype).config():
            raise DamagedError("it was written with another codec")
        segments = []
        for segment in manifest.segments:
            segments.append(body[start : start + segment.stored])
            start += segment.stored
        if start != len(body):
            raise DamagedError("its segments do not fill it")
        kv = decode_record(manifest, segments.__getitem__)
        return EncodedRecord(
            key=identity.key(), manifest=packed, segments=tuple(segments), stored_bytes=manifest.stored_bytes
        ), kv

    def deny(self, name: str) -> None:
        """Do not read this name any more in this process."""
        self.denied[name] = None
        while len(self.denied) > MOST_DENIED:
            self.denied.popitem(last=False)

    def note(self, problem: object, *, writing: bool = False) -> None:
        """Report a request's outcome, None for success, to its breaker; the failure that opens it is logged."""
        if (self.writes if writing else self.breaker).note(failed=problem is not None):
            logger.warning("the tier %s is not %s for now: %s", self.url, "written" if writing else "read", problem)


def _secret(config: TierConfig) -> bytes | None:
    if not config.secret:
        return None
    value = os.environ.get(config.secret, "")
    if len(value) < 16:
        raise ConfigError(
            f"The tier {shown(config.url)} needs a secret of 16 characters or more in the environment variable "
            f"{config.secret}."
        )
    return hashlib.sha256(b"ragkv tier" + value.encode()).digest()


def _cipher(secret: bytes) -> Any:
    with extra("A tier with a secret needs cryptography", "tiers"):
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    return AESGCM(secret)


def _decrypted(secret: bytes, body: Buffer, name: str) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        plain: bytes = _cipher(secret).decrypt(bytes(body[:_NONCE]), bytes(body[_NONCE:]), name.encode())
    except (InvalidTag, ValueError) as error:
        raise DamagedError("it was sealed with another secret") from error
    return plain


def _digest(name: str, body: Buffer) -> bytes:
    digest = xxhash.xxh3_128(name.encode())
    digest.update(body)
    return digest.digest()


Fetched = Mapping[KVIdentity, "tuple[EncodedRecord, ChunkKV]"]


class SharedTiers:
    """The tiers of an index, in their order. Thread-safe; no method raises because a tier fails."""

    def __init__(
        self, configs: Sequence[TierConfig], codec: Codec, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._codec = codec
        self._tiers = [_Connected(config, codec, clock) for config in configs]
        self._room = threading.Condition()
        self._waiting = 0
        self._closed = False
        self._writer = ThreadPoolExecutor(1, "ragkv-tier-write")

    def fetch(
        self, identities: Iterable[KVIdentity], *, shape: KVShape | None = None, seconds_per_token: float = 0.0
    ) -> Fetched:
        """The KV that a tier has, each as its record and as tensors on the CPU.

        Waits for a tier at most its `timeout`, and at most as long as encoding the missing chunks would take, if that
        was measured (`seconds_per_token`, else 0). KV found in a tier is later written to those before it.
        """
        fetched: dict[KVIdentity, tuple[EncodedRecord, ChunkKV]] = {}
        missing = list(dict.fromkeys(identities))
        for place, tier in enumerate(self._tiers):
            missing = [identity for identity in missing if identity not in fetched]
            if missing:
                encoding = sum(identity.tokens for identity in missing) * seconds_per_token
                new = self._from(tier, missing, shape, min(tier.config.timeout, encoding or tier.config.timeout))
                if new and place:  # the tiers before it are faster, and lack these
                    self._later([(identity, record) for identity, (record, _) in new.items()], self._tiers[:place])
                fetched |= new
        return fetched

    def _from(
        self, tier: _Connected, missing: Sequence[KVIdentity], shape: KVShape | None, deadline: float
    ) -> dict[KVIdentity, tuple[EncodedRecord, ChunkKV]]:
        names = {identity: tier.name(identity.key()) for identity in missing}
        wanted = [identity for identity in missing if names[identity] not in tier.denied]
        if not wanted or self._closed or not tier.breaker.allow():
            tier.use.skipped += len(missing)
            return {}
        fetched: dict[KVIdentity, tuple[EncodedRecord, ChunkKV]] = {}
        problem: object = "it was interrupted"
        try:
            asked = dict[Future[bytes | None], KVIdentity]()
            with suppress(RuntimeError):  # it was closed meanwhile, or no more threads can be started
                for identity in wanted:
                    asked[tier.threads.submit(tier.tier.get, names[identity])] = identity
            tier.use.skipped += len(wanted) - len(asked)
            done, late = wait(asked, timeout=deadline)
            problem = None if asked else "no thread could be started for it"
            for future in done:
                identity = asked[future]
                value, error = _outcome(future)
                if error is not None:
                    problem = error
                    tier.use.failures += 1
                elif value is None:
                    tier.use.misses += 1
                else:
                    try:
                        fetched[identity] = tier.unseal(value, identity, shape)
                        tier.use.hits += 1
                        tier.use.read_bytes += len(value)
                    except (DamagedError, ConfigError) as damage:
                        problem = damage
                        tier.use.damaged += 1
                        tier.deny(names[identity])
                        logger.warning("%s of the tier %s counts as missing: %s", names[identity], tier.url, damage)
            if late:
                tier.use.late, problem = tier.use.late + len(late), f"no answer within {deadline:.3g} s"
                for future in late:
                    future.cancel()
        finally:
            if problem is not None:
                with suppress(Exception):
                    tier.tier.interrupt()
            tier.note(problem)
        return fetched

    def offer(self, records: Sequence[tuple[KVIdentity, ChunkKV]], *, patient: bool = False) -> None:
        """Write new KV to all tiers, later, in a thread; drop it if too much waits, or with `patient` wait for room.

        `patient` waits for a tier that is up, and not longer than `TRANSFER_SECONDS`.
        """
        if patient:
            with self._room:
                self._room.wait_for(lambda: self._waiting <= WAITING_BYTES, timeout=TRANSFER_SECONDS)
        self._later(records, self._tiers)

    def _later(
        self, records: Sequence[tuple[KVIdentity, ChunkKV | EncodedRecord]], tiers: Sequence[_Connected]
    ) -> None:
        """Write to these tiers in the writing thread, unless too much waits already."""
        size = sum(kv.stored_bytes if isinstance(kv, EncodedRecord) else kv.nbytes for _, kv in records)
        with self._room:
            if self._closed or self._waiting > WAITING_BYTES:
                for tier in tiers:
                    tier.use.skipped += len(records)
                return
            self._waiting += size
        try:
            self._writer.submit(self._write, list(records), size, tiers)
        except RuntimeError:  # the interpreter is shutting down
            self._done(size)

    def _write(
        self, records: list[tuple[KVIdentity, ChunkKV | EncodedRecord]], size: int, tiers: Sequence[_Connected]
    ) -> None:
        try:
            for identity, kv in records:
                record = None
                for tier in tiers:
                    name = tier.name(identity.key())
                    if self._closed or name in tier.denied or not tier.writes.allow():
                        tier.use.skipped += 1
                        continue
                    problem: object = "it was interrupted"
                    try:
                        if record is None:
                            record = kv if isinstance(kv, EncodedRecord) else encode_record(kv, identity, self._codec)
                        value = tier.seal(record)
                        if tier.tier.put(name, value):
                            tier.use.written += 1
                            tier.use.written_bytes += len(value)
                        problem = None
                    except Exception as error:  # of any client
                        problem = error
                        tier.use.failures += 1
                    finally:
                        tier.note(problem, writing=True)
        finally:
            self._done(size)

    def _done(self, size: int) -> None:
        with self._room:
            self._waiting -= size
            self._room.notify_all()

    def delete(self, keys: Sequence[bytes]) -> bool:
        """Delete the values of these KV keys from all tiers; returns whether all tiers were reached.

        Pending writes are completed first, so that no value comes back after its deletion.
        """
        reached = self.settle()
        for connected in self._tiers if reached else ():
            try:
                connected.tier.delete([connected.name(key) for key in keys])
            except Exception as error:  # of any client
                logger.warning("the tier %s could not delete %d values: %s", connected.url, len(keys), error)
                reached = False
        return reached

    def check(self, identities: Iterable[KVIdentity]) -> list[dict[str, Any]]:
        """Read the values of these identities from every tier: how many are there, and the names of damaged ones."""
        wanted = list(identities)
        reports = []
        for tier in self._tiers:
            report: dict[str, Any] = {"url": tier.url, "present": 0, "absent": 0, "damaged": [], "error": None}
            for identity in wanted:
                name = tier.name(identity.key())
                try:
                    value = tier.tier.get(name)
                    if value is not None:
                        tier.unseal(value, identity, None)
                    report["present" if value is not None else "absent"] += 1
                except (DamagedError, ConfigError):
                    report["damaged"].append(name)
                except Exception as error:  # of any client
                    report["error"] = str(error)
                    break
            reports.append(report)
        return reports

    def uses(self) -> list[dict[str, Any]]:
        """The counters of each tier, with its URL and whether it is blocked now (`open`)."""
        return [{"url": tier.url, "open": tier.breaker.open, **asdict(tier.use)} for tier in self._tiers]

    def settle(self, seconds: float = TRANSFER_SECONDS) -> bool:
        """Wait until everything is written; False if that takes longer."""
        with self._room:
            return self._room.wait_for(lambda: self._waiting <= 0, timeout=seconds)

    def close(self) -> None:
        """Complete pending writes, for at most `TRANSFER_SECONDS`, and end the threads."""
        self.settle()
        self._closed = True
        for tier in self._tiers:
            with suppress(Exception):
                tier.tier.interrupt()
            tier.threads.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)


def _outcome(future: Future[bytes | None]) -> tuple[bytes | None, BaseException | None]:
    error = future.exception()
    return (future.result(), None) if error is None else (None, error)
