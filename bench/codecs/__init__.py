"""`python -m bench codecs`: rates and ratios of codecs, beside libraries that do the same."""
