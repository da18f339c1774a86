"""KV that is read where it lies: tensors over LMDB's map, without a copy.

For what is done within the read transaction, above all moving KV to a device: the bytes are checked where they
are and go straight there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.errors import ConfigError
from ragkv.kv import ChunkKV
from ragkv.store.codec import Raw, codec_from_config
from ragkv.store.decode import checked_segment
from ragkv.store.identity import KVIdentity
from ragkv.store.reader import find_manifest, read_many, warn_unusable
from ragkv.store.record import Manifest
from ragkv.store.seal import DamagedError
from ragkv.store.transaction import Transaction

__all__ = ["forget", "map_record", "move_many"]


def map_record(txn: Transaction, identity: KVIdentity) -> ChunkKV | None:
    """A record's tensors, each a view of the map where it lies in one piece; other codecs are decoded.

    They are read-only memory, which torch cannot know: writing to one ends the process. They die with `txn`.
    None for a miss, as everywhere.
    """
    key = identity.key()
    manifest = find_manifest(txn, key, identity)
    if manifest is None:
        return None
    try:
        if not isinstance(codec_from_config(manifest.codec), Raw):
            return read_many(txn, [identity]).get(identity)
        keys, values = [], []
        for layer in range(len(manifest.shapes)):
            payloads = [
                np.frombuffer(checked_segment(manifest, index, txn.segment(key, index)), np.uint8)
                for index in manifest.layer_run(layer)
            ]
            key_view, value_view = _layer(manifest, layer, payloads)
            keys.append(key_view)
            values.append(value_view)
    except (DamagedError, ConfigError) as error:
        warn_unusable(key, error)
        return None
    return ChunkKV(keys=tuple(keys), values=tuple(values), encoded_at=manifest.encoded_at)


def move_many(txn: Transaction, identities: Iterable[KVIdentity], device: torch.device) -> dict[KVIdentity, ChunkKV]:
    """The KV of these chunks on a device that is not the CPU, straight from the map; misses are left out."""
    found = {identity: map_record(txn, identity) for identity in dict.fromkeys(identities)}
    return {identity: kv.to(device) for identity, kv in found.items() if kv is not None}


def forget(kv: ChunkKV) -> None:
    """Empty the tensors, so that a late use is an error and no wrong number."""
    for tensor in (*kv.keys, *kv.values):
        tensor.set_()  # type: ignore[no-untyped-call]


def _layer(manifest: Manifest, layer: int, payloads: list[NDArray[np.uint8]]) -> tuple[Tensor, Tensor]:
    kv_heads, key_dim, value_dim = manifest.shapes[layer]
    pair, start = [], 0
    for dim in (key_dim, value_dim):
        end = start + kv_heads * manifest.tokens * dim * manifest.dtype.itemsize
        flat = _piece(payloads, start, end, manifest.dtype)
        pair.append(flat.view(manifest.dtype).view(kv_heads, manifest.tokens, dim))
        start = end
    return pair[0], pair[1]


def _piece(payloads: list[NDArray[np.uint8]], start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Bytes `start:end` of the payloads end to end: a view when one of them holds them all, aligned; else a copy."""
    at, parts = 0, []
    for payload in payloads:
        part = payload[max(0, start - at) : max(0, end - at)]
        at += payload.size
        if part.size:
            parts.append(part)
    if len(parts) == 1 and parts[0].ctypes.data % dtype.itemsize == 0:
        return torch.from_numpy(np.asarray(_Writable(parts[0])))
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.uint8))


class _Writable:
    """Says that the array may be written to, because torch warns of any that may not; keeps it alive."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        interface: dict[str, Any] = dict(array.__array_interface__)
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}
