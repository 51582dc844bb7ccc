"""Result files: their kinds, environments and digests; going on with unfinished ones."""
