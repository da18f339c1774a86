"""The document and KV store: one LMDB environment per index."""

from ragkv.store.codec import Codec, Raw, Slab, Zstd, codec_from_config, codec_names
from ragkv.store.environment import Store
from ragkv.store.identity import KVIdentity
from ragkv.store.memory import MemoryTier, MemoryUse
from ragkv.store.reader import KVReader
from ragkv.store.row import StoredDocument
from ragkv.store.stats import StoreStats
from ragkv.store.vector import ChunkVectors

__all__ = [
    "ChunkVectors",
    "Codec",
    "KVIdentity",
    "KVReader",
    "MemoryTier",
    "MemoryUse",
    "Raw",
    "Slab",
    "Store",
    "StoreStats",
    "StoredDocument",
    "Zstd",
    "codec_from_config",
    "codec_names",
]
