"""Sums over questions: what each row of a quality report is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragkv.evaluation.trace import Comparison

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Counts of tokens and questions; KL is a mean over tokens, so a long answer weighs more."""

    tokens: int = 0
    kl_sum: float = 0.0
    agreed: int = 0
    questions: int = 0
    same: int = 0
    right: list[bool] = field(default_factory=list)
    exact: bool = True
    stored_bytes: int = 0
    raw_bytes: int = 0

    def add(self, compared: Comparison, *, same: bool, right: bool | None) -> None:
        """One question: its tokens, whether the free answer is the reference's, whether it is right."""
        self.tokens += len(compared.kl)
        self.kl_sum += sum(compared.kl)
        self.agreed += sum(compared.agreed)
        self.questions += 1
        self.same += same
        if right is not None:
            self.right.append(right)

    @property
    def kl(self) -> float:
        return self.kl_sum / self.tokens

    @property
    def top1(self) -> float:
        return self.agreed / self.tokens

    @property
    def answers(self) -> float:
        return self.same / self.questions

    @property
    def accuracy(self) -> float | None:
        return sum(self.right) / len(self.right) if self.right else None
