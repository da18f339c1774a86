"""The document and KV store: one LMDB environment per index."""

from ragkv.store.codec import Codec, Raw, Zstd, codec_from_config, codec_names
from ragkv.store.environment import STORE_FILES, Store
from ragkv.store.identity import KVIdentity
from ragkv.store.lock import Holder
from ragkv.store.row import StoredDocument
from ragkv.store.stats import StoreStats

__all__ = [
    "STORE_FILES",
    "Codec",
    "Holder",
    "KVIdentity",
    "Raw",
    "Store",
    "StoreStats",
    "StoredDocument",
    "Zstd",
    "codec_from_config",
    "codec_names",
]
