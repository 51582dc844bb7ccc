"""`python -m bench swap`: training steps, swapped in every way that works on this device."""
