# SPDX-License-Identifier: Apache-2.0
"""`make deb`: packages for releases of Debian, made of the wheel and of its dependencies' wheels.

Nothing here needs the release that a package is for. docs/adr/0044-debian-package.md says why a
package looks as it does.
"""
