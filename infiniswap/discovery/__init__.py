# SPDX-License-Identifier: Apache-2.0
"""Who exists. Never what they can lend: placement asks the donors themselves."""
