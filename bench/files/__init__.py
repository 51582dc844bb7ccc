"""Result files: writing them, reading them, going on with them, comparing them."""
