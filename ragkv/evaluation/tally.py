"""Sums over questions, from which a row of the quality report is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragkv.evaluation.interval import difference_interval, mean_interval, share_interval
from ragkv.evaluation.trace import Comparison
from ragkv.evaluation.verdict import Agreement

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Lists with one entry per question. KL and top-1 are means over tokens, so a long answer weighs more."""

    tokens: list[int] = field(default_factory=list)
    kl_sums: list[float] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    exact: bool = True
    stored_bytes: int = 0
    raw_bytes: int = 0

    def add(self, compared: Comparison, *, same: bool, right: bool | None) -> None:
        """Add a question: its tokens, whether the free answer equals the reference, and whether it is right."""
        self.tokens.append(len(compared.kl))
        self.kl_sums.append(sum(compared.kl))
        self.agreed.append(sum(compared.agreed))
        self.same.append(same)
        if right is not None:
            self.right.append(right)

    @property
    def kl(self) -> float:
        return sum(self.kl_sums) / sum(self.tokens)

    @property
    def top1(self) -> float:
        return sum(self.agreed) / sum(self.tokens)

    @property
    def answers(self) -> float:
        return sum(self.same) / len(self.same)

    @property
    def accuracy(self) -> float | None:
        return sum(self.right) / len(self.right) if self.right else None

    @property
    def agreement(self) -> Agreement:
        """The intervals of `kl`, `top1` and `answers`."""
        return Agreement(
            kl=mean_interval(self.kl_sums, self.tokens),
            top1=share_interval(self.agreed, self.tokens),
            answers=share_interval(self.same),
        )

    def loss(self, full_right: list[bool]) -> tuple[float, float] | None:
        """The interval of the accuracy of `full` minus this accuracy; None without gold answers."""
        if not self.right:
            return None
        return difference_interval([full - own for full, own in zip(full_right, self.right, strict=True)])
