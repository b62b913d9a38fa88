"""Decides what each forward computes, keeps the cache's books, ends turns. Torch-free."""
