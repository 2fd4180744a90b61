"""Layers under FSDP2 and torch's tensor-parallel styles."""
