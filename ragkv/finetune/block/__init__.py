"""Block fine-tuning of the user's own model (`ragkv finetune block`, docs/finetune.md)."""

from ragkv.finetune.block.tuning import BlockTuneConfig, finetune_block

__all__ = ["BlockTuneConfig", "finetune_block"]
