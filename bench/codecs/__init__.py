"""`python -m bench codecs`: the project's own data for the codecs."""
