"""SwapAdvisor (Huang, Jin, Li, ASPLOS 2020): a joint search over schedule, pools and swaps."""
