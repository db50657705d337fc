# SPDX-License-Identifier: Apache-2.0
"""`make image`: the container image of a donor, from the Debian package, without an engine's daemon.

buildah puts a root that debootstrap has made into an archive (OCI), which podman, containerd and
others load. Nothing of the project enters here.
"""
