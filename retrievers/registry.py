"""Embedders and rerankers by name: "mini", a folder, a hub id, or a plug-in's name.

Your own package can add some under the entry-point groups `ragkv.embedders` and `ragkv.rerankers`: a name, and a
callable that takes `device` and `max_tokens` and returns an `Embedder` or a `Reranker`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ragkv.boundary.plugin import PluginRegistry
from ragkv.errors import ConfigError, ModelLoadError
from ragkv.retrievers.base import Embedder, Reranker, ScoreKind
from ragkv.retrievers.bge import ALL_KINDS, BGEM3
from ragkv.retrievers.layout import find_embedder, locate_embedder, locate_reranker
from ragkv.retrievers.rerank import CrossEncoder
from ragkv.retrievers.sentence import SentenceEmbedder

__all__ = [
    "embedder_fingerprint",
    "embedder_modes",
    "embedder_stamp",
    "load_embedder",
    "load_reranker",
    "reranker_fingerprint",
]

EMBEDDERS = PluginRegistry("ragkv.embedders")
RERANKERS = PluginRegistry("ragkv.rerankers")


def load_embedder(
    name: str, *, device: str, max_tokens: int | None = None, modes: Collection[ScoreKind] | None = None
) -> Embedder:
    """Load the embedder `name` on `device`; `modes` None is all kinds of vectors that it can give.

    `max_tokens` None is all that the checkpoint supports. Raises ModelLoadError when there is no such model or it does
    not work, ConfigError when it does not support `max_tokens` or cannot give `modes`.
    """
    if name in EMBEDDERS:
        embedder: Embedder = _plugin(EMBEDDERS, name, Embedder, device=device, max_tokens=max_tokens)
    else:
        folder = locate_embedder(name)
        if folder.layout == "bge-m3":
            embedder = BGEM3(folder, device=device, max_tokens=max_tokens, modes=modes)
        else:
            _require_modes(name, modes, SentenceEmbedder.modes)
            embedder = SentenceEmbedder(folder, device=device, max_tokens=max_tokens)
    _require_modes(name, modes, embedder.modes)
    return embedder


def load_reranker(name: str, *, device: str, max_tokens: int | None = None) -> Reranker:
    """Load the reranker `name` on `device`; errors as for `load_embedder`."""
    if name in RERANKERS:
        plugin: Reranker = _plugin(RERANKERS, name, Reranker, device=device, max_tokens=max_tokens)
        return plugin
    return CrossEncoder(name, device=device, max_tokens=max_tokens)


def embedder_fingerprint(name: str, max_tokens: int | None = None) -> str:
    """`Embedder.fingerprint` without loading the model. A local checkpoint is read in full, once per process.

    A hub model that is not in the local cache is fetched. A plug-in's factory may have `fingerprint_for(max_tokens)`;
    otherwise the plug-in is loaded on the CPU.
    """
    if name in EMBEDDERS:
        known = getattr(_factory(EMBEDDERS, name), "fingerprint_for", None)
        if known is None:
            return load_embedder(name, device="cpu", max_tokens=max_tokens).fingerprint
        told: str = known(max_tokens)
        return told
    folder = locate_embedder(name)
    return folder.fingerprint(folder.max_tokens(max_tokens))


def embedder_modes(name: str, *, fetch: bool = True) -> frozenset[ScoreKind] | None:
    """`Embedder.modes` without loading the model; None without `fetch` if the model has to be fetched first.

    A plug-in whose factory has no `modes` is loaded on the CPU.
    """
    if name in EMBEDDERS:
        known = getattr(_factory(EMBEDDERS, name), "modes", None)
        if isinstance(known, frozenset):
            return known
        return load_embedder(name, device="cpu").modes
    folder = locate_embedder(name) if fetch else find_embedder(name)
    if folder is None:
        return None
    return ALL_KINDS if folder.layout == "bge-m3" else SentenceEmbedder.modes


def embedder_stamp(name: str, max_tokens: int | None = None) -> str:
    """A digest over the sizes and times of the embedder's files, which is cheap and changes when a file is touched.

    Store it beside a fingerprint. While the stamp is the same, so is the fingerprint, and no query has to read the
    checkpoint. A plug-in's stamp is its fingerprint.
    """
    if name in EMBEDDERS:
        return embedder_fingerprint(name, max_tokens)
    folder = locate_embedder(name)
    return folder.stamp(folder.max_tokens(max_tokens))


def reranker_fingerprint(name: str) -> str:
    """What identifies a reranker in stored results, without loading it; for a plug-in, its name."""
    if name in RERANKERS:
        return name
    folder = locate_reranker(name)
    return folder.fingerprint(folder.max_tokens(None))


def _factory(plugins: PluginRegistry, name: str) -> Any:
    try:
        return plugins.load(name)
    except ImportError as error:
        raise ModelLoadError(f"The plug-in for {name!r} cannot be imported: {error}; install it again.") from error


def _plugin(plugins: PluginRegistry, name: str, protocol: Any, **arguments: Any) -> Any:
    made = _factory(plugins, name)(**arguments)
    if not isinstance(made, protocol):
        raise ModelLoadError(
            f"The plug-in for {name!r} returned {type(made).__name__}, which does not implement {protocol.__name__} "
            "(ragkv.retrievers.base); correct it or choose another model."
        )
    return made


def _require_modes(name: str, wanted: Collection[ScoreKind] | None, given: frozenset[ScoreKind]) -> None:
    if wanted is not None and (absent := set(wanted) - given):
        raise ConfigError(
            f"Embedder {name!r} gives {', '.join(sorted(given))} vectors, not {', '.join(sorted(absent))}; choose "
            "another retrieval mode or an embedder in bge-m3's layout."
        )
