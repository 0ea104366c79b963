"""Checkpoints on disk, in the format of torch.distributed.checkpoint (DCP).

`background` is the entry point for training; `writing` and `reading` do the work.
"""
