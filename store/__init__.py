"""The document and KV store: one LMDB environment per index."""

from ragkv.store.codec import Codec, Raw, Slab, Zstd, codec_from_config, codec_names
from ragkv.store.environment import Store
from ragkv.store.identity import KVIdentity
from ragkv.store.quantiser import Int4, Int8
from ragkv.store.row import StoredDocument
from ragkv.store.stats import StoreStats
from ragkv.store.vector import ChunkVectors

__all__ = [
    "ChunkVectors",
    "Codec",
    "Int4",
    "Int8",
    "KVIdentity",
    "Raw",
    "Slab",
    "Store",
    "StoreStats",
    "StoredDocument",
    "Zstd",
    "codec_from_config",
    "codec_names",
]
