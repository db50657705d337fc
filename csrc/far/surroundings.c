/* SPDX-License-Identifier: Apache-2.0 */
/* Whether an agent may be in this process: it reserves addresses, and discards what it has moved.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

/* Of what a limit of addresses leaves, the agent reserves at most one part in so many: the program
 * counts on the rest. */
#define SHARE      8u
#define BLOCKS_MIN 32u /* below this it is not worth its threads */
/* Fields of /proc/thread-self/statm, in pages. */
#define STATM_SIZE 0u
#define STATM_DATA 5u

static bool read_first(const char *path, char *text, size_t bytes)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got;

	if (fd < 0)
		return false;
	got = read(fd, text, bytes - 1);
	iswf_real()->close(fd);
	if (got <= 0)
		return false;
	text[got] = '\0';
	return true;
}

/* mlockall(MCL_FUTURE), also with MCL_ONFAULT: what is locked cannot be discarded. */
static bool locks_all(void)
{
	void *page = iswf_real()->mmap(NULL, ISWF_PAGE_BYTES, PROT_READ | PROT_WRITE,
				       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	bool locks;

	if (page == MAP_FAILED)
		return true; /* beyond RLIMIT_MEMLOCK */
	locks = iswf_real()->madvise(page, ISWF_PAGE_BYTES, MADV_DONTNEED) != 0;
	iswf_real()->munmap(page, ISWF_PAGE_BYTES);
	return locks;
}

/* Bytes of addresses that the process may still reserve under that limit. */
static uint64_t left_under(int resource, uint32_t field)
{
	struct rlimit limit;
	char statm[128], *at = statm;
	uint64_t used = 0;

	if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
		return UINT64_MAX;
	if (!read_first("/proc/thread-self/statm", statm, sizeof(statm)))
		return 0;
	for (uint32_t i = 0; i <= field; i++)
		used = strtoull(at, &at, 10) * ISWF_PAGE_BYTES;
	return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

/* Every reserved byte counts there, whether it is used or not. */
static bool kernel_commits_strictly(void)
{
	char mode[8];

	return read_first("/proc/sys/vm/overcommit_memory", mode, sizeof(mode)) && mode[0] == '2';
}

enum iswf_off iswf_look_around(uint32_t *blocks_max_out)
{
	const uint64_t beside =
		(uint64_t)(ISWF_SHADOW_SLOTS + ISWF_CRADLE_SLOTS) * ISWF_BLOCK_BYTES;
	uint64_t left, data;

	/* A filter of system calls may end the process for one that only the agent makes. */
	if (prctl(PR_GET_SECCOMP) != 0)
		return ISWF_OFF_SANDBOX;
	if (locks_all())
		return ISWF_OFF_LOCKED;
	if (kernel_commits_strictly())
		return ISWF_OFF_ADDRESSES;
	left = left_under(RLIMIT_AS, STATM_SIZE);
	data = left_under(RLIMIT_DATA, STATM_DATA);
	if (data < left)
		left = data;
	if (left == UINT64_MAX) {
		*blocks_max_out = UINT32_MAX;
		return ISWF_OFF_NONE;
	}
	if (left / SHARE < beside + (uint64_t)BLOCKS_MIN * ISWF_BLOCK_BYTES)
		return ISWF_OFF_ADDRESSES;
	*blocks_max_out = (uint32_t)((left / SHARE - beside) / ISWF_BLOCK_BYTES);
	return ISWF_OFF_NONE;
}
