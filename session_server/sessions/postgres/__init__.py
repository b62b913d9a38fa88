"""Keep sessions in PostgreSQL, so that several replicas of the server have them in one place.

The verbs and reads are those of `sessions.store.database`, which keeps them in a file. What is new
is whose a session is: see `leases` and `sessions.store.ownership`. Nothing else names psycopg.
"""
