# SPDX-License-Identifier: Apache-2.0
"""Command line: each module or room here is a command of that name (`main` finds them).

`common` is what they share. Nothing else of Infiniswap imports from here.
"""
