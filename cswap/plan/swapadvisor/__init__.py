"""SwapAdvisor (Huang, Jin, Li, ASPLOS 2020): schedule, pools and swaps, searched together."""
