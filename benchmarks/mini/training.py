"""Train the bundled mini model: a small Llama that answers from retrieved passages.

The curriculum is a sequence of `Stage`s (`recipe.DEFAULT_STAGES`): copying random records, which forms induction heads;
questions on few passages; then every kind of question on many passages, with a share of rows in the block layout
(Block-Attention §2). A row depends only on (seed, stage, step, its place in the step), so a killed run continues from
its last checkpoint with the same rows, bit for bit on one machine.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.benchmarks.mini.attention import NAME, packings, register
from ragkv.benchmarks.mini.induction import start_induction
from ragkv.benchmarks.mini.labelled import shot_sample
from ragkv.benchmarks.mini.layout import additive_mask
from ragkv.benchmarks.mini.mixture import mixed_sample, prose_sample
from ragkv.benchmarks.mini.peers import ALONE, Peer, peers
from ragkv.benchmarks.mini.recipe import MiniTrainConfig, Stage
from ragkv.benchmarks.mini.sample import (
    FIRST_WEIGHT,
    GOLD_WEIGHT,
    RELATION_WEIGHT,
    Batch,
    Sample,
    collate,
    copy_sample,
    qa_sample,
)
from ragkv.benchmarks.mini.tokenizer import SPECIAL_TOKENS
from ragkv.finetune.mask import visible
from ragkv.finetune.trainingloop import Progress, save_checkpoint

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["build_model", "grow", "train_mini", "weighted_loss"]

_WATCHED = {
    "first_accuracy": FIRST_WEIGHT,
    "relation_accuracy": RELATION_WEIGHT,
    "gold_accuracy": GOLD_WEIGHT,
}
logger = logging.getLogger(__name__)


def build_model(config: MiniTrainConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new Llama with tied embeddings in fp32, initialised from the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.seed)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=config.layers,
        **config.shape(),
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(shape)
    if config.start is None:
        start_induction(model)
    else:
        grow(model, LlamaForCausalLM.from_pretrained(config.start, dtype=torch.float32))
    return model


def grow(model: LlamaForCausalLM, source: LlamaForCausalLM) -> None:
    """Copy the weights of `source` into `model`, which may have more layers and must not differ otherwise.

    The new layers are spread among those of `source`. Their output projections are zero, so they add nothing to the
    residual stream until they are trained, and the grown model first computes exactly what `source` computes.
    """
    import torch

    have, want = len(source.model.layers), len(model.model.layers)
    if have > want:
        raise ValueError(f"the model to start from has {have} layers, more than {want}")
    state = {name: value for name, value in source.state_dict().items() if ".layers." not in name}
    model.load_state_dict(state, strict=False)
    places = [round((index + 1) * want / have) - 1 for index in range(have)]  # the last layer stays the last
    for index, layer in enumerate(model.model.layers):
        if index in places:
            layer.load_state_dict(source.model.layers[places.index(index)].state_dict())
        else:
            with torch.no_grad():
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()


def weighted_loss(
    model: LlamaForCausalLM, batch: Batch, *, autocast: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weighted mean cross-entropy over the target tokens of a packed batch, with `correct` and `weights`.

    `correct` (targets,) bool says where the argmax equals the target; `weights` (targets,) tell the kinds of token
    apart. Only hidden states that predict a weighted token go through the output matrix.
    """
    import torch
    from torch.nn import functional as F

    device = batch.tokens.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        columns = (batch.segments, batch.asks, batch.block)
        if model.config._attn_implementation == NAME:
            seen: dict[str, Any] = {"packing": packings(*columns)}
        else:
            seen = {"attention_mask": additive_mask(visible(*columns), torch.bfloat16 if autocast else torch.float32)}
        hidden = model.model(
            input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **seen
        ).last_hidden_state  # (rows, tokens, hidden)
        wanted = batch.weights[:, 1:] > 0
        logits = model.lm_head(hidden[:, :-1][wanted])  # (targets, vocab)
    targets, weights = batch.tokens[:, 1:][wanted], batch.weights[:, 1:][wanted]
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum(), logits.argmax(-1) == targets, weights


def train_mini(
    config: MiniTrainConfig,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    *,
    resume: bool = True,
    on_progress: Progress | None = None,
) -> LlamaForCausalLM:
    """Run every stage and return the trained model in fp32; `output/checkpoint.pt` is written on the way.

    With `resume`, training continues from the checkpoint in `output`; one of another model shape is refused. After
    every step `on_progress` receives stage, step, number (over all stages), loss, accuracy, first_accuracy,
    relation_accuracy, gold_accuracy (teacher-forced, NaN while copying), lr, tokens and seconds. If processes share the
    rows, the figures are those of this process's rows.
    """
    output.mkdir(parents=True, exist_ok=True)
    with peers(config.processes, partial(_train, config, tokenizer, output, resume)) as peer:
        return _train(config, tokenizer, output, resume, peer, on_progress)


def _train(
    config: MiniTrainConfig,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    resume: bool,
    peer: Peer,
    on_progress: Progress | None = None,
) -> LlamaForCausalLM:
    """The part of `train_mini` that runs in each process."""
    import torch

    model = build_model(config, tokenizer).to(config.device).train()
    if config.device == "cpu":
        model.set_attn_implementation(register())
    optimizer = _optimizer(config, model)
    path, done = output / "checkpoint.pt", 0
    if resume and path.exists():
        done = _restore(path, config, model, optimizer)
    total = sum(stage.steps for stage in config.stages)
    for stage, step, number in _schedule(config):
        if number < done:
            continue
        started = time.perf_counter()
        lr = _learning_rate(config, stage, step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        rows = _rows(config, stage, step, tokenizer, peer)
        batch = collate(rows, pad=int(tokenizer.pad_token_id))
        batch = Batch(*(column.to(config.device) for column in batch))
        loss, correct, weights = weighted_loss(model, batch, autocast=config.autocast)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        peer.mean_gradients(model, float(weights.sum()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        if peer.rank == 0 and ((number + 1) % config.checkpoint_every == 0 or number + 1 == total):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
            save_checkpoint(path, {"shape": _shape(config), "done": number + 1, **state})
        if on_progress is not None:
            on_progress(
                {
                    "stage": stage.name,
                    "step": step,
                    "number": number,
                    "loss": float(loss.detach()),
                    "accuracy": float(correct.float().mean()),
                    **{name: float(correct[weights == weight].float().mean()) for name, weight in _WATCHED.items()},
                    "lr": lr,
                    "tokens": int(batch.tokens.numel()),
                    "seconds": time.perf_counter() - started,
                }
            )
    return model.eval()


def _schedule(config: MiniTrainConfig) -> Iterator[tuple[Stage, int, int]]:
    """Yield (stage, step within the stage, step over all stages)."""
    number = 0
    for stage in config.stages:
        for step in range(stage.steps):
            yield stage, step, number
            number += 1


def _learning_rate(config: MiniTrainConfig, stage: Stage, step: int) -> float:
    """Warm up at the start of every stage, then move linearly to the stage's final rate."""
    final = stage.lr if stage.final_lr is None else stage.final_lr
    rate = stage.lr + (final - stage.lr) * step / max(1, stage.steps - 1)
    return rate * min(1.0, (step + 1) / config.warmup)


def _rows(
    config: MiniTrainConfig, stage: Stage, step: int, tokenizer: PreTrainedTokenizerFast, peer: Peer = ALONE
) -> list[Sample]:
    """Draw the rows of `peer` in one step. All rows have equally many passages, so that there is little padding."""
    key = f"{config.seed}:{stage.name}:{step}"
    count, batch = stage.draw(random.Random(key))
    batch = max(batch, peer.count)
    return [_row(random.Random(f"{key}:{row}"), stage, count, tokenizer) for row in peer.rows(batch)]


def _row(rng: random.Random, stage: Stage, count: int, tokenizer: PreTrainedTokenizerFast) -> Sample:
    """Draw one row of `count` passages, or of `count` records to copy."""
    if stage.kind == "copy":
        return copy_sample(rng, vocab=(len(SPECIAL_TOKENS), len(tokenizer)), records=count)
    if stage.kind == "mixed":
        return _mixed_row(rng, stage, count, tokenizer)
    return qa_sample(
        rng,
        tokenizer,
        passage_range=(count, count),
        questions=stage.questions,
        block=rng.random() < stage.block_share,
        misses=stage.misses,
        hard=stage.hard > 0 and rng.random() < stage.hard,
    )


def _mixed_row(rng: random.Random, stage: Stage, count: int, tokenizer: PreTrainedTokenizerFast) -> Sample:
    block = rng.random() < stage.block_share
    drawn = rng.random()
    if drawn < stage.prose:
        return prose_sample(rng, tokenizer, passage_range=(count, count), block=block)
    if drawn < stage.prose + stage.shots:
        # a chunk of a few shots is shorter than a passage
        return shot_sample(rng, tokenizer, chunks=count * 3 // 2, questions=stage.questions, block=block)
    return mixed_sample(
        rng,
        tokenizer,
        passage_range=(count, count),
        questions=stage.questions,
        block=block,
        hard=rng.random() < stage.hard,
    )


def _optimizer(config: MiniTrainConfig, model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices and none on norms."""
    import torch

    matrices = [value for value in model.parameters() if value.ndim >= 2]
    vectors = [value for value in model.parameters() if value.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay, "scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "scale": 5.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-9)


def _shape(config: MiniTrainConfig) -> dict[str, Any]:
    """The fields in which a checkpoint must agree with the configuration."""
    fields = asdict(config)
    return {name: fields[name] for name in ("hidden", "layers", "q_heads", "kv_heads", "intermediate", "seed")}


def _restore(path: Path, config: MiniTrainConfig, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint and return the number of steps that it has done."""
    import torch

    state = torch.load(path, map_location=config.device, weights_only=True)
    if state["shape"] != _shape(config):
        raise ValueError(f"{path} was written for {state['shape']}; move it away or pass resume=False")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"].cpu())
    logger.info("resuming at step %d from %s", state["done"], path)
    return int(state["done"])
