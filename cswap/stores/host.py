"""The host tier: pooled memory for encodings, up to a limit."""

from cswap.pool import BufferPool


class HostStore(BufferPool):
    """Host memory for encodings. Size classes add 1/32 to each encoding, at most 1/8.

    `take` gives None as well if the host has no more memory.
    """

    raises = False
