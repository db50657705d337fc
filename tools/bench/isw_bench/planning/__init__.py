# SPDX-License-Identifier: Apache-2.0
"""`make bench-plan`: what `infiniswap plan` predicts, beside separate runs of the same jobs.

`jobs` names the five jobs, `score` plans and runs them, `tables` judges and draws. Only
`isw_bench.__main__` enters.
"""
