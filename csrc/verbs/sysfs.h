/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RDMA devices in the kernel's own files. What is asked here costs no more than opening a small
 * file, and does not open a device.
 */
#ifndef ISWI_VERBS_SYSFS_H
#define ISWI_VERBS_SYSFS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "isw.h"

#define ISWI_SYSFS_CLASS "/sys/class"

/* The first entry of the kernel's list of devices. False: there is none. */
bool iswi_sysfs_device(char *name_out, size_t bytes);

/* Adds the addresses of a port, by its device's name and its number, of a table of so many. */
void iswi_sysfs_gids(struct isw_rdma_port *port, uint32_t count);

/* The entries of an opened device, whatever it is called. */
struct iswi_sysfs {
	int node_fd, device_fd;        /* -1: not known */
	bool missed;                   /* the node had gone when we came */
	atomic_uint_fast64_t until_ns; /* who waits for its end, at most; 0: nobody has */
};

/* node: by which programs open the device, like "uverbs0". */
void iswi_sysfs_open(struct iswi_sysfs *at, const char *class_directory, const char *node);
void iswi_sysfs_close(struct iswi_sysfs *at);
/*
 * Whether the host is removing the device: that begins with its node. Where the driver cannot take
 * it from a program (soft-RoCE's) the kernel then waits until every program has closed it. False
 * when nobody knows.
 */
bool iswi_sysfs_is_leaving(const struct iswi_sysfs *at);
/*
 * Whether all of it has gone: the kernel has then ended everything that programs had there. Waits
 * for it until wait_ms after the first call. False when nobody knows.
 */
bool iswi_sysfs_has_gone(struct iswi_sysfs *at, uint32_t wait_ms);

#endif
