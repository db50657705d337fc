# SPDX-License-Identifier: Apache-2.0
"""What a test needs of the machine: limits, guests, networks, processors."""
