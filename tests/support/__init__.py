# SPDX-License-Identifier: Apache-2.0
"""What several tests share, by what it stands for. Tests import it as `support`.

Nothing here is a test.
"""
