"""Steps that are repeated: each saved tensor goes the way that was learned for its slot."""
