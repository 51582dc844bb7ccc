"""Models, data and ways to train them, for every benchmark."""
