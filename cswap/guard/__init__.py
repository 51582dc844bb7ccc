"""The accuracy guard: one module's gradients, lossy against exact."""
