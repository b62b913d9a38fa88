"""Account for every page of KV: which session, turn or tree node holds it.

`SessionAwareCache` is the entry point: open sessions, lend their KV to turns, evict under pressure;
`cache.checker` checks the accounts. Only `cache.pool` imports torch.
"""
