# SPDX-License-Identifier: Apache-2.0
"""Hook of mkdocs (mkdocs.yml), before all others: the pages are made without the C library.

The parsers, from which the manual comes, are in modules that bind it. None of its functions is
called for the manual, so in a checkout where nothing was built a name takes its place.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_NAME = "infiniswap.engine._isw"

try:
    importlib.import_module(_NAME)
except ImportError:
    _stand_in = ModuleType(_NAME)
    _stand_in.ffi = _stand_in.lib = None  # type: ignore[attr-defined]
    sys.modules[_NAME] = _stand_in
