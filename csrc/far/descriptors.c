/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of the agent's, which a program that closes all it knows must not close (F1). */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define OWN_MAX 16u
#define FD_MIN  700 /* above what programs number by hand; lower where the limit is lower */

static atomic_int own[OWN_MAX]; /* fd + 1; 0: free */

void iswf_keep_own(int fd)
{
	for (uint32_t i = 0; i < OWN_MAX; i++) {
		int none = 0;

		if (atomic_compare_exchange_strong(&own[i], &none, fd + 1))
			return;
	}
}

int iswf_own_fd(int fd)
{
	int moved, err;

	if (fd < 0)
		return -errno;
	moved = fcntl(fd, F_DUPFD_CLOEXEC, FD_MIN);
	if (moved < 0)
		moved = fcntl(fd, F_DUPFD_CLOEXEC, FD_MIN / 7);
	err = errno;
	iswf_real()->close(fd);
	if (moved < 0)
		return -err;
	iswf_keep_own(moved);
	return moved;
}

void iswf_close_own(int fd)
{
	for (uint32_t i = 0; i < OWN_MAX; i++) {
		int is = fd + 1;

		if (atomic_compare_exchange_strong(&own[i], &is, 0))
			break;
	}
	if (fd >= 0)
		iswf_real()->close(fd);
}

bool iswf_spares(int fd)
{
	for (uint32_t i = 0; i < OWN_MAX; i++)
		if (atomic_load_explicit(&own[i], memory_order_relaxed) == fd + 1)
			return fd >= 0;
	return false;
}
