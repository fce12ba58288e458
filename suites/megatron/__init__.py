"""The adapters, qualified inside a real Megatron model: tables, checks, and the processes that run them."""
