"""Train the mini reranker: a cross-encoder in bge-reranker-v2-m3's layout that begins as the mini embedder's encoder.

Every question is read with one passage that answers it and several that do not: those that the embedder likes best,
and some at random. A softmax over the group teaches the order, a sigmoid per pair teaches what a logit means by
itself, for fusion uses it as a probability (PCED Eq. 6).
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ragkv.finetune.embedder import M3, Progress, pad
from ragkv.finetune.encoder import MAX_TOKENS, EncoderShape, encoder_config
from ragkv.finetune.retrieval import Step, prose_step, world_step
from ragkv.finetune.tokenizer import english_texts

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerFast, XLMRobertaForSequenceClassification

__all__ = ["RerankerTrainConfig", "build_reranker", "train_reranker"]

PROSE_EVERY = 6
MATCHING = 17.0
"""Length of a query or key at the start: equal tokens then have logits of about 9 per head, strangers of 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerTrainConfig:
    """`asks` questions per step, each beside one right passage, `hard` that the embedder likes and `easy` others.

    `shape` is the embedder's; `added` layers come after its own.
    """

    shape: EncoderShape = field(default_factory=EncoderShape)
    added: int = 2
    steps: int = 800
    asks: int = 12
    hard: int = 3
    easy: int = 1
    size: int = 20
    lr: float = 5e-4
    weight_decay: float = 0.01
    warmup: float = 0.05
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    device: str = "cpu"
    autocast: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.asks < 1 or self.hard < 0 or self.easy < 1 or self.size < 8:
            raise ValueError("steps, asks and easy must be at least 1, hard at least 0, size at least 8")


def build_reranker(config: RerankerTrainConfig, embedder: M3) -> XLMRobertaForSequenceClassification:
    """A cross-encoder of the embedder's layers, a layer that begins as its late interaction, and a new head; fp32."""
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
    """Let every token look at those that the ColBERT head finds alike, in the question and in the passage.

    Without it, 80 steps taught the cross-encoder nothing: that a word of the question stands in the passage too is
    what it needs first, and no layer of the embedder compares tokens.
    """
    import torch

    with torch.no_grad():
        typical = embedder.colbert.weight.norm()  # of its output, for hidden states are normalised to length sqrt(d)
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
    """Train, keep `output/checkpoint.pt` fresh, return the reranker (fp32).

    A checkpoint in `output` of another shape or number of steps is refused (ValueError). `on_progress` receives step,
    steps, loss, first (share of questions whose right passage is first of its group), lr and seconds.
    """
    import torch
    from torch.nn import functional as F

    model = build_reranker(config, embedder).to(config.device)
    for module in embedder.modules.values():
        module.to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config.lr, total_steps=config.steps + 1, pct_start=config.warmup, final_div_factor=100
    )
    path, first, spent = output / "checkpoint.pt", 0, 0.0
    output.mkdir(parents=True, exist_ok=True)
    if resume and path.exists():
        saved = torch.load(path, map_location=config.device, weights_only=True)
        if saved["shape"] != asdict(config.shape) or saved["steps"] != config.steps:
            raise ValueError(f"{path} was written with another shape or number of steps; choose another folder")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first, spent = saved["step"], saved["seconds"]
    prose = list(english_texts(1_200_000))
    started = time.perf_counter() - spent
    for step in range(first, config.steps):
        rng = random.Random(f"ragkv-reranker:{config.seed}:{step}")
        if step % PROSE_EVERY == PROSE_EVERY - 1:
            data = prose_step(rng, prose, count=config.asks)
        else:
            data = world_step(rng, tokenizer, worlds=1, size=config.size, asks=config.asks)
        pairs, right = _groups(config, rng, embedder, tokenizer, data)
        batch = tokenizer(
            [question for question, _ in pairs],
            [passage for _, passage in pairs],
            padding=True,
            truncation="only_second",
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(config.device)
        with torch.autocast(config.device.split(":")[0], dtype=torch.bfloat16, enabled=config.autocast):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        scores = logits.float().view(right.shape)  # (questions, group)
        ordered = F.cross_entropy(scores, right.float().argmax(1))
        judged = F.binary_cross_entropy_with_logits(scores, right.float())
        loss = ordered + judged
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        lr = float(schedule.get_last_lr()[0])
        schedule.step()
        seconds = time.perf_counter() - started
        if on_progress is not None:
            best = right.gather(1, scores.argmax(1, keepdim=True)).float().mean().item()
            on_progress(
                {
                    "step": step + 1,
                    "steps": config.steps,
                    "loss": loss.item(),
                    "first": best,
                    "lr": lr,
                    "seconds": seconds,
                }
            )
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            saved = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "shape": asdict(config.shape),
                "steps": config.steps,
                "step": step + 1,
                "seconds": seconds,
            }
            fresh = path.with_suffix(".new")
            torch.save(saved, fresh)
            fresh.replace(path)
    return model


def _groups(
    config: RerankerTrainConfig,
    rng: random.Random,
    embedder: M3,
    tokenizer: PreTrainedTokenizerFast,
    data: Step,
) -> tuple[list[tuple[str, str]], torch.Tensor]:
    """Pairs of (question, passage), and (questions, group) which of them are right: the first of each group."""
    import torch

    with torch.inference_mode():
        asked = embedder(*pad(tokenizer, [ask.question for ask in data.asks], config.device)).dense
        read = embedder(*pad(tokenizer, data.passages, config.device)).dense
        liked = (asked @ read.T).argsort(1, descending=True).tolist()
    pairs: list[tuple[str, str]] = []
    groups = 0
    for ask, order in zip(data.asks, liked, strict=True):
        wrong = [place for place in order if place not in ask.answers]
        if len(wrong) < config.hard + config.easy:
            continue
        chosen = [rng.choice(ask.answers), *wrong[: config.hard], *rng.sample(wrong[config.hard :], config.easy)]
        pairs += [(ask.question, data.passages[place]) for place in chosen]
        groups += 1
    right = torch.zeros(groups, 1 + config.hard + config.easy, dtype=torch.bool, device=config.device)
    right[:, 0] = True
    return pairs, right
