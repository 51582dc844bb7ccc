"""`cswap bench codecs`: rates and ratios of codecs, beside other compression libraries."""
