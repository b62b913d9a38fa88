"""Measure sessions against other servers on the same random weights: `session-server bench peers`.

`models` writes the weights, `cells` says what is measured and what the goals are, `ours`, `llama`
and `generating` run one system each behind the protocol of `system`, `rounds` measures them in
turns, `report` compares, and `own` measures what has no peer.
"""
