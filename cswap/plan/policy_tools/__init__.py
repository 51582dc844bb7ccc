"""Tools that several planning policies share."""
