"""`python -m cswap`."""

from cswap.cli import main

if __name__ == "__main__":
    main()
