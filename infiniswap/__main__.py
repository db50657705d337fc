# SPDX-License-Identifier: Apache-2.0
"""`python -m infiniswap`."""

from __future__ import annotations

import sys

from infiniswap.cli.main import main

sys.exit(main())
