// SPDX-License-Identifier: Apache-2.0
#include "util/util.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FLOCK_TICK_MS 5u
#define CA_NAME_BYTES 16u /* TCP_CA_NAME_MAX of linux/tcp.h, which netinet/tcp.h excludes */

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

/* CUBIC is the kernel's default; Reno is always built in. */
static void leave_bbr(int fd)
{
	static const char *const others[] = {"cubic", "reno"};
	char name[CA_NAME_BYTES] = "";
	socklen_t bytes = sizeof(name);

	if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) != 0 ||
	    strncmp(name, "bbr", 3) != 0)
		return;
	for (size_t i = 0; i < ISWI_ARRAY_LEN(others); i++)
		if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, others[i], strlen(others[i])) == 0)
			return;
}

void iswi_page_socket_tune(int fd)
{
	const int on = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	leave_bbr(fd);
}
