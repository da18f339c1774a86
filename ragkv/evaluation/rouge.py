"""ROUGE-L as computed by the PyPI package `rouge` 1.0.1, which LongBench uses.

It differs from the ROUGE-L of the paper (Lin 2004) and of `rouge-score`: it is on summary level, sentences are the
texts between full stops, and a longest common subsequence is counted by its *distinct* words, as are both texts. Only
the words of one longest common subsequence count, so ties are broken as in the package (pltrdy/rouge,
`rouge/rouge_score.py`: rouge_l_summary_level, _recon_lcs). There is one difference: the package recurses once per word
and fails at about a thousand words without a full stop, which LongBench counts as 0.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["rouge_l"]

_EPSILON = 1e-8  # the package's, so equal texts score 1 - 5e-9


def rouge_l(found: str, gold: str) -> float:
    """The F score of two texts, below 1; 0.0 if one of them has no sentence."""
    found_sentences, gold_sentences = _sentences(found), _sentences(gold)
    if not found_sentences or not gold_sentences:
        return 0.0
    common: set[str] = set()
    for sentence in gold_sentences:
        for other in found_sentences:
            common |= _common_words(sentence, other)
    precision = len(common) / len({word for sentence in found_sentences for word in sentence})
    recall = len(common) / len({word for sentence in gold_sentences for word in sentence})
    return 2 * precision * recall / (precision + recall + _EPSILON)


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence. As in the package, a blank sentence has one empty word."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_words(x: Sequence[str], y: Sequence[str]) -> set[str]:
    """The distinct words of the longest common subsequence whose trace prefers to step back in `y`."""
    lengths = [[0] * (len(y) + 1)]  # (len(x) + 1, len(y) + 1): of the first i and j words
    for word in x:
        above, row = lengths[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    words: set[str] = set()
    i, j = len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            words.add(x[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words
