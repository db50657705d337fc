# SPDX-License-Identifier: Apache-2.0
"""aiohttp, imported without the host's certificates; everything here takes it from this module.

aiohttp makes two TLS contexts when it is imported, and reads every certificate authority of the
host for each. Nothing here trusts one of those: that would be a fifth of a process's start, and
memory that a device's process locks (contexts of ours: infiniswap.control.tls). OpenSSL reads the
file that SSL_CERT_FILE names instead, see SSL_CTX_set_default_verify_paths(3).
"""

from __future__ import annotations

import os

_NAMES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_saved = {name: os.environ.get(name) for name in _NAMES}
os.environ.update(dict.fromkeys(_NAMES, os.devnull))
try:
    import aiohttp
    from aiohttp import web
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.http import HttpProcessingError
finally:
    for _name, _value in _saved.items():
        if _value is None:
            del os.environ[_name]
        else:
            os.environ[_name] = _value

__all__ = ["HttpProcessingError", "ResponseHandler", "aiohttp", "web"]
