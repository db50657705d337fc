# SPDX-License-Identifier: Apache-2.0
"""`make pictures`: docs/page.png, docs/page-dark.png and docs/top.png, of a cluster that it makes.

`__main__` makes the cluster and its jobs, `shoot` is what runs on one of its hosts. Nothing else
enters.
"""
