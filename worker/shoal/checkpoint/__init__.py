"""Checkpoints on disk, in the format of torch.distributed.checkpoint (DCP).

`background` is the way in for training, `writing` and `reading` do the work.
"""
