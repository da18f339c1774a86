"""Tensors over LMDB's map, without a copy.

They are for use within a read transaction, above all for moving KV to a device: the bytes are checked in the map and
copied directly to the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import add

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.attention.kv import DTYPES, ChunkKV, Place, State
from ragkv.attention.shape import ITEM_SIZES, KVShape
from ragkv.errors import ConfigError
from ragkv.store.codec import Raw, codec_from_config
from ragkv.store.format.decode import checked_segment
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.record import Manifest
from ragkv.store.format.tensor import typed_tensor
from ragkv.store.reader import find_manifest, read_many, warn_unusable
from ragkv.store.seal import DamagedError
from ragkv.store.transaction import Transaction

__all__ = ["forget", "map_record", "move_many"]


def map_record(txn: Transaction, identity: KVIdentity, shape: KVShape | None = None) -> ChunkKV | None:
    """A record's tensors; None for a miss.

    Those of the raw codec are views of the map where they are contiguous; other codecs are decoded. The map is
    read-only memory, which torch does not know: writing to such a tensor kills the process. The tensors die with `txn`.
    """
    key = identity.key()
    manifest = find_manifest(txn, key, identity, shape)
    if manifest is None:
        return None
    try:
        if not isinstance(codec_from_config(manifest.codec), Raw) or not manifest.segments:
            return read_many(txn, [identity], shape).get(identity)
        if any(segment.raw != segment.stored for segment in manifest.segments):
            raise DamagedError("its segments are not as long as its tensors")
        payloads = [
            np.frombuffer(checked_segment(manifest, index, txn.segment(key, index)), np.uint8)
            for index in range(len(manifest.segments))
        ]
    except (DamagedError, ConfigError) as error:
        warn_unusable(key, error)
        return None
    return _over_map(manifest, payloads)


def move_many(
    txn: Transaction, identities: Iterable[KVIdentity], place: Place, shape: KVShape | None = None
) -> dict[KVIdentity, ChunkKV]:
    """The KV of these chunks on another device or several, copied from the map; misses are left out."""
    found = {identity: map_record(txn, identity, shape) for identity in dict.fromkeys(identities)}
    return {identity: kv.to(place, copy=True) for identity, kv in found.items() if kv is not None}


def forget(kv: ChunkKV) -> None:
    """Empty the tensors, so that using them later is an error instead of a wrong number or a crash."""
    for tensor in kv.tensors:
        tensor.set_()  # type: ignore[call-overload]


def _over_map(manifest: Manifest, payloads: list[NDArray[np.uint8]]) -> ChunkKV:
    """Tensors as views of one tensor that spans all segments and what is between them in the map.

    Making a tensor from memory for each of them would take longer than the checksums.
    """
    dtype, item_size, tokens = DTYPES[manifest.dtype], ITEM_SIZES[manifest.dtype], manifest.tokens
    addresses = [int(payload.__array_interface__["data"][0]) for payload in payloads]
    sizes = [payload.size for payload in payloads]
    base = min(addresses) // item_size * item_size
    span = max(map(add, addresses, sizes)) - base
    flat = torch.from_numpy(np.asarray(_Span(base, span, item_size, payloads))).view(dtype)
    tensors = []
    index = begin = start = 0  # a segment; where it begins, and where the tensor begins, in the record's bytes
    for kv_heads, key_dim, value_dim in manifest.shapes:
        for dim in (key_dim, value_dim):
            end = start + kv_heads * tokens * dim * item_size
            if end == start:  # the layer keeps no such tensor
                tensors.append(flat.new_empty((kv_heads, tokens, dim)))
                continue
            while begin + sizes[index] <= start:
                begin, index = begin + sizes[index], index + 1
            offset, rest = divmod(addresses[index] + start - begin - base, item_size)
            if end <= begin + sizes[index] and not rest:  # it is within one segment, and aligned
                tensors.append(flat.as_strided((kv_heads, tokens, dim), (tokens * dim, dim, 1), offset))
            else:
                copy = np.concatenate(list(_parts(payloads[index:], start - begin, end - begin)))
                tensors.append(torch.from_numpy(copy).view(dtype).view(kv_heads, tokens, dim))
            start = end
    states = []
    for place, (layer, name, of, shape) in enumerate(manifest.states, len(manifest.shapes)):
        run = payloads[manifest.layer_run(place).start : manifest.layer_run(place).stop]
        whole = run[0] if len(run) == 1 else np.concatenate(run)
        address = int(whole.__array_interface__["data"][0])
        held = np.asarray(_Span(address, whole.size, 1, whole))
        states.append(State(layer, name, typed_tensor(of, held).view(shape)))
    return ChunkKV(
        keys=tuple(tensors[::2]), values=tuple(tensors[1::2]), encoded_at=manifest.encoded_at, states=tuple(states)
    )


def _parts(payloads: list[NDArray[np.uint8]], start: int, end: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes `start:end` of the concatenated payloads."""
    for payload in payloads:
        if end <= 0:
            return
        yield payload[max(0, start) : end]
        start, end = start - payload.size, end - payload.size


class _Span:
    """Memory as an array of integers of `item_size` bytes, which keeps `owner` alive.

    It claims to be writable, because torch warns about arrays that are not.
    """

    def __init__(self, address: int, nbytes: int, item_size: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (-(-nbytes // item_size),),
            "typestr": f"<i{item_size}",
            "data": (address, False),
        }
