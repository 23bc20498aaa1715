"""What the ``kvstore`` command does to a cache, beside a running engine or without one.

Reads run in slices of at most 1,000 records or 50 ms, resumed by key, so that they never keep LMDB
from reusing pages for long; what changes while they run is seen or not. Nothing here loads a model
or imports torch.
"""
