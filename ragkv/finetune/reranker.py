"""Train the mini reranker: a cross-encoder in bge-reranker-v2-m3's layout that starts from the mini embedder.

Each question is read with a passage that answers it and several that do not: those that the embedder ranks highest, and
random ones. A softmax over the group trains the order. A sigmoid per pair trains the logit itself, which fusion uses as
a probability (PCED Eq. 6).

One label per pair trains slowly (80 steps had no effect). So every token of the pair also predicts its score in the
embedder's late interaction, the cosine of its best match in the other text. The head for that is thrown away.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ragkv.finetune.embedder import M3, Vectors, pad
from ragkv.finetune.encoder import MAX_TOKENS, encoder_config
from ragkv.finetune.retrieval_data import Step, prose_step, world_step
from ragkv.finetune.trainingloop import Progress, TrainConfig, run_training
from ragkv.finetune.trainingtext import english_texts

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerFast, XLMRobertaForSequenceClassification

__all__ = ["RerankerTrainConfig", "build_reranker", "train_reranker"]

PROSE_EVERY = 6
MATCH_WEIGHT = 20.0
SHORT, LONG = 32, 96
MATCHING = 17.0
"""Initial length of a query or key: equal tokens then have logits of about 9 per head, others of about 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerTrainConfig(TrainConfig):
    """A step has `asks` questions, each with a right passage, `hard` ones that the embedder ranks high, `easy` ones.

    `shape` is the embedder's; `added` layers come after its own. The first `short` steps read passages of about `SHORT`
    tokens, because matching is learned faster among few tokens.
    """

    steps: int = 1100
    added: int = 2
    short: int = 500
    asks: int = 12
    hard: int = 3
    easy: int = 1
    size: int = 20

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        if self.asks < 1 or self.easy < 1 or min(self.hard, self.added, self.short) < 0 or self.size < 8:
            raise ValueError("asks and easy must be at least 1, hard, added and short at least 0, size at least 8")


def build_reranker(config: RerankerTrainConfig, embedder: M3) -> XLMRobertaForSequenceClassification:
    """A cross-encoder in fp32: the embedder's layers, new ones that start as its late interaction, and a new head."""
    import torch
    from transformers import XLMRobertaForSequenceClassification

    torch.manual_seed(config.seed)
    vocab = embedder.encoder.config.vocab_size
    shape = replace(config.shape, layers=config.shape.layers + config.added)
    model = XLMRobertaForSequenceClassification(encoder_config(shape, vocab, num_labels=1))
    model.roberta.load_state_dict(embedder.encoder.state_dict(), strict=False)
    if config.added:
        _start_matching(model.roberta.encoder.layer[config.shape.layers].attention.self, embedder)
    return model


def _start_matching(attention: nn.Module, embedder: M3) -> None:
    """Let every token attend to the tokens that the ColBERT head finds similar, in the question and in the passage.

    A cross-encoder first has to see that a word of the question is also in the passage, but no layer of the embedder
    compares tokens. Without this start, 80 steps had no effect.
    """
    import torch

    with torch.no_grad():
        typical = (
            embedder.colbert.weight.norm()
        )  # length of its output, because hidden states are normalised to length sqrt(d)
        for name in ("query", "key"):
            linear = cast("nn.Linear", getattr(attention, name))
            linear.weight.copy_(embedder.colbert.weight * (MATCHING / typical))
            linear.bias.copy_(embedder.colbert.bias * (MATCHING / typical))


def train_reranker(
    config: RerankerTrainConfig,
    embedder: M3,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    *,
    resume: bool = True,
    on_progress: Progress | None = None,
) -> XLMRobertaForSequenceClassification:
    """Train and return the reranker in fp32; see `run_training` for checkpoints and progress.

    The figure first is the share of questions whose right passage is ranked first in its group; off is the mean squared
    error of the tokens' predictions.
    """
    import torch
    from torch.nn import functional as F

    model = build_reranker(config, embedder)
    for module in embedder.modules.values():
        module.to(config.device)
    teller = torch.nn.Linear(config.shape.hidden, 1)
    prose = list(english_texts(1_200_000))

    def step(number: int) -> tuple[torch.Tensor, Mapping[str, float]]:
        rng = random.Random(f"ragkv-reranker:{config.seed}:{number}")
        data = _step(config, rng, tokenizer, prose, number)
        with torch.inference_mode():
            asked = embedder(*pad(tokenizer, [ask.question for ask in data.asks], config.device))
            read = embedder(*pad(tokenizer, data.passages, config.device))
        pairs, right = _groups(config, rng, data, asked.dense @ read.dense.T)
        batch = tokenizer(
            [data.asks[ask].question for ask, _ in pairs],
            [data.passages[place] for _, place in pairs],
            padding=True,
            truncation="only_second",
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(config.device)
        matched = _matches(asked, read, pairs, batch["input_ids"].shape[1])
        with torch.autocast(config.device.split(":")[0], dtype=torch.bfloat16, enabled=config.autocast):
            hidden = model.roberta(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
            logits = model.classifier(hidden)
            told = teller(hidden).squeeze(-1)  # (pairs, tokens)
        scores = logits.float().view(right.shape)  # (questions, group)
        ordered = F.cross_entropy(scores, right.float().argmax(1))
        judged = F.binary_cross_entropy_with_logits(scores, right.float())
        known = matched >= 0
        off = F.mse_loss(told.float()[known], matched[known])
        first = right.gather(1, scores.argmax(1, keepdim=True)).float().mean().item()
        return ordered + judged + MATCH_WEIGHT * off, {"first": first, "off": off.item()}

    run_training(config, {"model": model, "teller": teller}, step, output, resume=resume, on_progress=on_progress)
    return model


def _step(
    config: RerankerTrainConfig,
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    prose: Sequence[str],
    number: int,
) -> Step:
    if number % PROSE_EVERY == PROSE_EVERY - 1:
        return prose_step(rng, prose, count=config.asks)
    short = number < config.short
    asks, limit = (2 * config.asks, SHORT) if short else (config.asks, LONG)
    return world_step(rng, tokenizer, worlds=1, size=config.size, asks=asks, limit=limit)


def _groups(
    config: RerankerTrainConfig, rng: random.Random, data: Step, likes: torch.Tensor
) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Pairs of (question, passage) indices, and a mask (questions, group) of the right ones, which come first."""
    import torch

    pairs: list[tuple[int, int]] = []
    groups = 0
    for number, (ask, order) in enumerate(zip(data.asks, likes.argsort(1, descending=True).tolist(), strict=True)):
        wrong = [place for place in order if place not in ask.answers]
        if len(wrong) < config.hard + config.easy:
            continue
        chosen = [rng.choice(ask.answers), *wrong[: config.hard], *rng.sample(wrong[config.hard :], config.easy)]
        pairs += [(number, place) for place in chosen]
        groups += 1
    right = torch.zeros(groups, 1 + config.hard + config.easy, dtype=torch.bool, device=likes.device)
    right[:, 0] = True
    return pairs, right


def _matches(asked: Vectors, read: Vectors, pairs: Sequence[tuple[int, int]], width: int) -> torch.Tensor:
    """The cosine of each token's best match in the other text, (pairs, width); -1 for special tokens and padding.

    In a pair, the question's tokens begin at 1 and the passage's tokens two after the question's `</s>`. In `Vectors`,
    row i belongs to token i + 1, and the last counted row to `</s>`.
    """
    import torch

    found = torch.full((len(pairs), width), -1.0, device=asked.dense.device)
    for row, (ask, place) in enumerate(pairs):
        question = asked.colbert[ask, : int(asked.counts[ask]) - 1]
        passage = read.colbert[place, : int(read.counts[place]) - 1]
        cosines = question @ passage.T
        start = 1 + len(question) + 2
        passage_best = cosines.amax(0)[: max(0, width - start - 1)]  # without tokens that were truncated
        found[row, 1 : 1 + len(question)] = cosines.amax(1).clamp(min=0)
        found[row, start : start + len(passage_best)] = passage_best.clamp(min=0)
    return found
