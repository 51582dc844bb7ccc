"""The published models as plain `torch.nn` modules; `catalogue` lists them all."""
