# SPDX-License-Identifier: Apache-2.0
"""What a service inherits from whoever starts it: cgroups, limits, priority and processors.

Swap space belongs to the whole host, and so does what serves it: not to a shell, a session or a
batch job's step that can be limited, frozen or killed. `groups` knows the cgroups of a process,
`leave` has a service leave those of a session and takes the rest off it as far as that may be,
`limits` compares limits with what a service needs, `in_force` says what still holds, and `kills`
names the memory limit for which the kernel has killed a process. Starters, devices and doctor
enter.
"""
