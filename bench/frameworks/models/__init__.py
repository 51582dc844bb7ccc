"""Models as their packages make them, a file per family, with data of random values."""
