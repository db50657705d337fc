# SPDX-License-Identifier: Apache-2.0
"""Other people's benchmarks with a part of their memory, and who bears it best: `make bench-apps`.

`command` is the order of events; `jobs` names the jobs, whose programs lie in `programs` and know
nothing of this; `rivals` set up where memory goes, and `cell` runs one job under one rival.
`plan`, `ledger`, `summary` and `tables` are pure or only keep files.
"""
