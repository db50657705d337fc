# SPDX-License-Identifier: Apache-2.0
"""What killed processes have left, and a device that dies under a `run`. Commands enter."""
