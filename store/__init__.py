"""The document and KV store: one LMDB environment per index."""

from ragkv.store.codec import Codec, Raw, Zstd, codec_from_config, codec_names
from ragkv.store.environment import Store
from ragkv.store.identity import KVIdentity
from ragkv.store.row import StoredDocument
from ragkv.store.stats import StoreStats

__all__ = [
    "Codec",
    "KVIdentity",
    "Raw",
    "Store",
    "StoreStats",
    "StoredDocument",
    "Zstd",
    "codec_from_config",
    "codec_names",
]
