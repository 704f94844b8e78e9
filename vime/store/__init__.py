"""Where sample payloads lie between the process that makes them and the trainer rank that needs them: a class a kind of store."""

from vime.store.shared_memory import SharedMemoryStore

STORES = {"shared_memory": SharedMemoryStore}
"""A new store is one class and one line here; it is made of the run's own folder in memory, by the driver and by every rank."""
