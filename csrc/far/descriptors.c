/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of the agent's, which a program that closes all it knows must not close (F1). */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define OWN_MAX 48u
#define FD_MIN  700 /* above what programs number by hand; lower where the limit is lower */

static atomic_int own[OWN_MAX]; /* fd + 1; 0: free */
static uint64_t inherited;      /* those that a forked child keeps; set before there are threads */

static uint32_t keep(int fd)
{
	for (uint32_t i = 0; i < OWN_MAX; i++) {
		int none = 0;

		if (atomic_compare_exchange_strong(&own[i], &none, fd + 1))
			return i;
	}
	return OWN_MAX;
}

void iswf_inherit_fd(int fd)
{
	inherited |= 1ull << keep(fd);
}

/* Where no high number is free, or no other at all, it keeps the one that it has. */
int iswf_own_fd(int fd)
{
	int moved;

	if (fd < 0)
		return -errno;
	moved = fcntl(fd, F_DUPFD_CLOEXEC, FD_MIN);
	if (moved < 0)
		moved = fcntl(fd, F_DUPFD_CLOEXEC, FD_MIN / 7);
	if (moved >= 0)
		iswf_real()->close(fd);
	else
		moved = fd;
	(void)keep(moved);
	return moved;
}

void iswf_close_own(int fd)
{
	if (fd < 0)
		return;
	for (uint32_t i = 0; i < OWN_MAX; i++) {
		int is = fd + 1;

		if (atomic_compare_exchange_strong(&own[i], &is, 0))
			break;
	}
	iswf_real()->close(fd);
}

void iswf_drop_own(void)
{
	for (uint32_t i = 0; i < OWN_MAX; i++)
		if (!(inherited >> i & 1))
			iswf_close_own(atomic_load(&own[i]) - 1);
}

int iswf_next_own(unsigned int from)
{
	int next = -1;

	for (uint32_t i = 0; i < OWN_MAX; i++) {
		int fd = atomic_load_explicit(&own[i], memory_order_relaxed) - 1;

		if (fd >= 0 && (unsigned int)fd >= from && (next < 0 || fd < next))
			next = fd;
	}
	return next;
}

bool iswf_spares(int fd)
{
	return fd >= 0 && iswf_next_own((unsigned int)fd) == fd;
}
