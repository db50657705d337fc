// SPDX-License-Identifier: Apache-2.0
#include "util/util.h"

#define FLOCK_TICK_MS 5u

#include <errno.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

int iswi_read_full(int fd, void *data, size_t bytes)
{
	char *at = data;

	while (bytes > 0) {
		ssize_t got = read(fd, at, bytes);

		if (got == 0)
			return -ENODATA;
		if (got < 0) {
			if (errno == EINTR)
				continue;
			return -errno;
		}
		at += got;
		bytes -= (size_t)got;
	}
	return 0;
}

int iswi_flock_wait(int fd, uint32_t wait_ms_max)
{
	const struct timespec tick = {.tv_nsec = FLOCK_TICK_MS * 1000000};

	for (uint32_t waited_ms = 0;; waited_ms += FLOCK_TICK_MS) {
		if (!flock(fd, LOCK_EX | LOCK_NB))
			return 0;
		if ((errno != EWOULDBLOCK && errno != EINTR) || waited_ms >= wait_ms_max)
			return -errno;
		nanosleep(&tick, NULL);
	}
}
