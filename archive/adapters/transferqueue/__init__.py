"""TransferQueue (of verl, NeMo-RL and others) on any store and any number of storage units: its `save_checkpoint` and
`load_checkpoint`, by their names. The running system is archived; a checkpoint is put into one.

    import transfer_queue as tq
    tq.init(conf)
    transferqueue.load_checkpoint("s3://bucket/queue")                 # where there is a checkpoint
    ck = transferqueue.save_checkpoint("s3://bucket/queue", metadata={"step": 10})

What is saved:

| of | as |
|---|---|
| a sample, a global index | an episode of one step |
| tensors of any dtype and shape, nested ones too | ragged fields of one entry; single numbers as a field of one row |
| texts; other values: JSON, arrays, tensors, nests of these | fields of text, of JSON; arrays in them ragged fields |
| anything else | refused by name, before anything is uploaded that counts; nothing is pickled |
| global index, partition, key, tag; which tasks consumed it | attributes: saved anew where they change |
| production and consumption of each partition, its fields | state |
| which global indexes are given out, which come next | state |
| the sampler's state | state: its next batches are those that it would have drawn |
| `metadata` | the checkpoint's progress |

A checkpoint is one commit: a crash leaves the one before. Samples that it has are not uploaded again, whatever process
saves the next one; content that changed is an episode of its own. TransferQueue's own save needs a file system that all
hosts share, its load as many storage units as there were; here samples go to the units that the running system has.
`transferqueue.follow(w)`, with `w = arc.writer(journal_s=2.0)`, journals what changes between checkpoints;
`load_checkpoint(arc.recover())` takes it.
"""

from __future__ import annotations

from archive.base import package

package("torch", "archive.adapters.transferqueue", "'trajectory-archive[torch]'")

from archive.adapters.transferqueue.adapter import load_checkpoint, save_checkpoint
from archive.adapters.transferqueue.live import follow

__all__ = [
    "follow",
    "load_checkpoint",
    "save_checkpoint",
]
