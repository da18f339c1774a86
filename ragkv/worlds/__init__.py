"""Fictional worlds, whose facts no model knows, so that a right answer proves that the context was read."""

from ragkv.worlds.content import Fact, QuestionKind, WorldDocument, WorldQuestion
from ragkv.worlds.name import Split, split_of
from ragkv.worlds.questionmaker import UNANSWERABLE, comparisons, lists, unanswerable, untold
from ragkv.worlds.world import World

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
    "untold",
]
