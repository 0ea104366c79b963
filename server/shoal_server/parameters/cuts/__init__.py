"""Cuts: shards as of one moment, read chunk by chunk while pushes go on."""
