// SPDX-License-Identifier: Apache-2.0
#include "util/util.h"

#include <errno.h>
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
