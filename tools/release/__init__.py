# SPDX-License-Identifier: Apache-2.0
"""`make release`: what is published of a commit, in build/release/.

The packages are built by `make`; here the commit is looked at before, and afterwards the source
archive, the release notes, the bill of materials and the digests are made.
"""
