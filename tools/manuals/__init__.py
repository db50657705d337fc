# SPDX-License-Identifier: Apache-2.0
"""The manual: pages made of the command line's parsers and of texts in docs/man/."""
