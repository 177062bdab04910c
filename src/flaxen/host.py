"""The former name of `flaxen.malloc`, for programs that still import it."""

from flaxen.malloc import restart_with_tuned_malloc as settle_memory

__all__ = ["settle_memory"]
