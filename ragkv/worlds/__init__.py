"""Fictional worlds, whose facts no model has seen, so that a right answer proves that the context was read."""

from ragkv.worlds.world import (
    UNANSWERABLE,
    Fact,
    QuestionKind,
    Split,
    World,
    WorldDocument,
    WorldQuestion,
    comparisons,
    lists,
    split_of,
    unanswerable,
    unstated,
)

__all__ = [
    "UNANSWERABLE",
    "Fact",
    "QuestionKind",
    "Split",
    "World",
    "WorldDocument",
    "WorldQuestion",
    "comparisons",
    "lists",
    "split_of",
    "unanswerable",
    "unstated",
]
