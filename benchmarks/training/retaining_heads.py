"""`python -m ragkv.benchmarks.training.retaining_heads`: train retaining heads for a model (Locret; APB §3.4).

The model is frozen. It reads an example's prompt and response once. From a token's own query, key and value, the heads
of each layer learn to predict the highest attention logit that the token will get from the response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor, nn

from ragkv.attention.partial import LayerCall
from ragkv.benchmarks.training.loop import Training, drawn
from ragkv.cli.console import echo, print_json, size, steps
from ragkv.cli.main import SingleCommand, log_to_stderr, run
from ragkv.cli.options import Device, Json, Quiet, shared_options
from ragkv.config import PromptConfig
from ragkv.errors import ConfigError, UsageError
from ragkv.finetune.data import ExampleTokens, Progress, file_digest, read_examples, tokenise
from ragkv.model.apb.compressors import RetainingHeads, highest_logits, widths_of
from ragkv.model.apb.document import AnchorAttention
from ragkv.model.checkpoint import HEADS
from ragkv.util.options import Option

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainingConfig:
    """The settings of a training of retaining heads; the defaults are the paper's (APB)."""

    model: Annotated[str, Option("Model folder or hub id; it is not changed.")]
    data: Annotated[Path, Option("JSONL file to learn from (docs/finetune.md).")]
    output: Annotated[Path | None, Option("File for the heads.", "beside the model")] = None
    steps: Annotated[int, Option("Steps, of one line each.")] = 3000
    warmup: Annotated[int, Option("Steps in which the learning rate rises.")] = 300
    lr: Annotated[float, Option("Highest learning rate.")] = 5e-4
    clip: Annotated[float, Option("Longest gradient.")] = 0.5
    smooth: Annotated[float, Option("Weight of the loss of neighbouring scores.")] = 0.0025
    inner: Annotated[int, Option("Width of the heads' hidden layer.")] = 1024
    pool: Annotated[int, Option("A token gets the highest score of this many neighbours, an odd number.")] = 5
    max_tokens: Annotated[int, Option("Longer lines are left out.")] = 10240
    seed: Annotated[int, Option("Seed of weights and data.")] = 0
    checkpoint_every: Annotated[int, Option("Steps between checkpoints.")] = 100
    resume: Annotated[bool, Option("Continue from the last checkpoint, or start again.")] = True
    device: str | None = None

    def __post_init__(self) -> None:
        if min(self.steps, self.inner, self.max_tokens, self.checkpoint_every) < 1 or min(self.lr, self.clip) <= 0:
            raise ConfigError("steps, inner, max_tokens and checkpoint_every must be at least 1, lr and clip above 0.")
        if not (0 < self.pool < 1000 and self.pool % 2):
            raise ConfigError(f"pool must be an odd number below 1000, not {self.pool}.")
        if self.warmup < 0 or not 0 <= self.smooth < math.inf:
            raise ConfigError("warmup and smooth must be at least 0.")


@dataclass(frozen=True, slots=True, eq=False)
class RetainingExample:
    """One layer's training example: the heads' inputs for a prompt's n tokens, and their labels.

    `query` `(q_heads, n, head_dim)` and `key` without positions, `value` `(kv_heads, n, head_dim)`, `labels`
    `(kv_heads, n)`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    labels: Tensor


class _ExampleCollector(AnchorAttention):
    """Collects every layer's example from one causal pass over `prompt` tokens and the response after them."""

    def __init__(self, model: LanguageModel, prompt: int) -> None:
        super().__init__(model, [], 0)
        self._rotary, self._prompt = model.rotary, prompt
        self.examples: dict[int, RetainingExample] = {}

    def layer_known(self, call: LayerCall) -> None:
        n, layer, key = self._prompt, call.layer, call.key
        labels = highest_logits(call.query[0, :, n:], key[0, :, :n], call.scale)
        back = -torch.arange(n, device=key.device)[None]
        asking, asked = (self._rotary.rotate(states[:, :, :n], layer, back)[0] for states in (call.query, key))
        self.examples[layer] = RetainingExample(asking, asked, call.value[0, :, :n], labels)


def retaining_example(
    model: LanguageModel, prompt: Sequence[int], response: Sequence[int]
) -> dict[int, RetainingExample]:
    """The examples by layer, for layers with their own keys; no gradient reaches the model."""
    collector = _ExampleCollector(model, len(prompt))
    model.through([*prompt, *response], 0, collector)
    # clones, because autograd takes no tensors of inference mode
    return {
        layer: RetainingExample(own.query.clone(), own.key.clone(), own.value.clone(), own.labels.clone())
        for layer, own in collector.examples.items()
    }


def retaining_loss(scores: Tensor, labels: Tensor, smooth: float) -> Tensor:
    """SmoothL1(scores, labels) + `smooth` · MSE of neighbouring scores, both means, of `(kv_heads, n)` (Locret)."""
    loss = nn.functional.smooth_l1_loss(scores, labels)
    if scores.shape[1] < 2:
        return loss
    return loss + smooth * nn.functional.mse_loss(scores[:, :-1], scores[:, 1:])


def train_retaining_heads(config: RetainingConfig, *, on_progress: Progress | None = None) -> dict[str, Any]:
    """Train heads for `config.model`, write them to `config.output`, and return a summary.

    A checkpoint beside the heads lets the same settings continue; it is deleted at the end. Raises UsageError for bad
    data or a run of other settings, ModelLoadError for a model that cannot have heads.
    """
    from ragkv.model.self_check import load_model

    examples = [
        replace(example, question=question, response=response, others=())
        for example in read_examples(config.data, PromptConfig())
        for question, response in ((example.question, example.response), *example.others)
    ]
    model = load_model(config.model, device=config.device, train=True)
    path = _output(config, model)
    widths = widths_of(model)
    short = [example for example in tokenise(model, examples) if _tokens(example) <= config.max_tokens]
    if not short:
        raise UsageError(f"All lines of {config.data} are longer than {config.max_tokens} tokens; give --max-tokens.")
    identity = model.checkpoint.digest(model.revision)
    own = ("output", "resume", "device", "checkpoint_every")  # may differ when a run is resumed
    settings = {name: value for name, value in asdict(config).items() if name not in own}
    settings |= {"data": file_digest(config.data), "model": identity}
    torch.manual_seed(config.seed)
    heads = RetainingHeads(widths, config.inner).to(model.device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=config.lr, betas=(0.9, 0.95))
    training = Training(
        modules={"heads": heads},
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, config)),
        path=path.with_suffix(".training"),
        settings=settings,
        steps=config.steps,
        every=config.checkpoint_every,
        clip=config.clip,
    )
    if config.resume:
        training.resume()

    def advance(step: int) -> dict[str, float]:
        loss = _loss(config, model, heads, short[drawn(config.seed, step, len(short))])
        loss.backward()  # type: ignore[no-untyped-call]
        return {"loss": loss.item()}

    training.run(advance, on_progress=on_progress)
    heads.save(path, identity, pool=config.pool)
    path.with_suffix(".training").unlink(missing_ok=True)
    counts = {"examples": len(short), "left_out": len(examples) - len(short), "bytes": path.stat().st_size}
    return {"output": str(path), "steps": config.steps, **counts, **training.losses}


def _tokens(example: ExampleTokens) -> int:
    return len(example.prefix) + sum(map(len, example.chunks)) + len(example.suffix) + len(example.response)


def _output(config: RetainingConfig, model: LanguageModel) -> Path:
    if config.output is None and not model.checkpoint.local:
        raise UsageError("A model of the hub has no folder of its own; name a file for the heads with --output.")
    path = Path(model.checkpoint.location) / HEADS if config.output is None else config.output.expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written; name a file in a folder that is there.")
    return path


def _share(step: int, config: RetainingConfig) -> float:
    """The share of the highest learning rate: up over the warm-up, then down to zero at the end, both linearly."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    return max(0.0, (config.steps - step) / max(1, config.steps - config.warmup))


def _loss(config: RetainingConfig, model: LanguageModel, heads: RetainingHeads, example: ExampleTokens) -> Tensor:
    """The mean over the layers of one example's loss."""
    prompt = [*example.prefix, *(token for chunk in example.chunks for token in chunk), *example.suffix]
    losses = [
        retaining_loss(heads(layer, own.query, own.key, own.value).float(), own.labels, config.smooth)
        for layer, own in retaining_example(model, prompt, example.response).items()
    ]
    return torch.stack(losses).mean()


COMMAND = "python -m ragkv.benchmarks.training.retaining_heads"
app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command(cls=SingleCommand, no_args_is_help=True)
@shared_options
def train(*, config: RetainingConfig, device: Device = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Train retaining heads (Locret), by which the engine `apb` chooses what blocks pass on; the model is frozen.

    They are one small file beside the model, which `apb` then uses. The same command continues a stopped run.

    Example: `python -m ragkv.benchmarks.training.retaining_heads --model ./my-model --data train.jsonl`
    """
    log_to_stderr(debug=False)
    with steps("training", silent=quiet or as_json) as show:
        done = train_retaining_heads(
            replace(config, device=device),
            on_progress=lambda step: show(int(step["step"]), int(step["steps"]), f"loss {float(step['loss']):.3f}"),
        )
    if as_json:
        print_json(done)
        return
    learnt = f"{done['steps']} steps, loss {done['loss_first']:.3f} to {done['loss_last']:.3f}"
    echo(f"{learnt}; the heads are in {done['output']} ({size(done['bytes'])}).")


if __name__ == "__main__":
    run(app, COMMAND)
