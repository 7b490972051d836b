"""The main job in small: chats that come back, served from restored KV cache.

A real decoder answers questions about source files, its KV cache moves through the GPU pool,
host memory and a store on disk, and every restored turn is compared with a recomputed one.
Importing this package imports nothing heavy; see `kvtier.demo.run.run_demo`.
"""
