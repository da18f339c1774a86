"""The document and KV store: one LMDB environment per index."""

from ragkv.store.cache import MemoryTier, MemoryUse
from ragkv.store.codecs import Q8, Codec, Half, Int4, Int8, KVSlice, Raw, Zstd, codec_from_config, codec_names
from ragkv.store.documents import DocumentChange
from ragkv.store.environment import Holder
from ragkv.store.maintenance.eviction import Use, UseTotals
from ragkv.store.maintenance.repair import Repair, RepairSource
from ragkv.store.maintenance.space import Collection, Copy, DocumentStats, KVRecord, StoreStats
from ragkv.store.maintenance.verify import Notify, Problem, Progress, Verification
from ragkv.store.record import KVIdentity, Manifest
from ragkv.store.store import STORE_FILES, Store
from ragkv.store.tables import ChunkVectors, StoredDocument
from ragkv.util.files import sync_path

__all__ = [
    "Q8",
    "STORE_FILES",
    "ChunkVectors",
    "Codec",
    "Collection",
    "Copy",
    "DocumentChange",
    "DocumentStats",
    "Half",
    "Holder",
    "Int4",
    "Int8",
    "KVIdentity",
    "KVRecord",
    "KVSlice",
    "Manifest",
    "MemoryTier",
    "MemoryUse",
    "Notify",
    "Problem",
    "Progress",
    "Raw",
    "Repair",
    "RepairSource",
    "Store",
    "StoreStats",
    "StoredDocument",
    "Use",
    "UseTotals",
    "Verification",
    "Zstd",
    "codec_from_config",
    "codec_names",
    "sync_path",
]
