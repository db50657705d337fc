# SPDX-License-Identifier: Apache-2.0
"""`make image`: a container image of the donor, made of the Debian package.

No engine's daemon is needed: buildah puts a root that debootstrap has made into an archive (OCI),
which podman, containerd and others load.
"""
