"""The execution advisor: chooses a codec for each tensor on this machine."""
