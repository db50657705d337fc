# SPDX-License-Identifier: Apache-2.0
"""Virtual machines to test against real kernels in (docs/vm.md).

A Debian kernel under QEMU, with this host's own files as its root: read-only over 9p, under an
overlay in the guest's memory. `plan` is what is to be, `cache` and `kernels` and `initrd` make
what is kept between runs, `qemu` is QEMU's command line, `machine` runs it, `cli` is the command
`tools/vm`; what runs inside is in guest/.
"""
