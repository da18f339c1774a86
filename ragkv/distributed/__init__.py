"""Several processes answer together, each with a part of the KV: `torchrun … -m ragkv.distributed`."""
