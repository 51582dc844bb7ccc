"""`python -m bench inlined`: codecs inside of compiled graphs, against hooks between them."""
