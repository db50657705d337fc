/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel takes page cache before memory of programs. Left to itself it swaps the program's
 * memory out to keep files that were read once, and the same bytes leave and come back by both
 * ways.
 *
 * Version 1 of cgroups: their swappiness, which stays at 1 where a program ends by a signal; the
 * next one with an agent finds that. Version 2 has none: there, files are reclaimed ahead of need.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "far/agent.h"

#define PATH_BYTES 1088u
#define SWAPPINESS "100" /* of a run's job: infiniswap/system/cgroup.py */
/* So long after a reclaim that found too little: each looks at all files. */
#define RESTS_NS 200000000ull

static struct {
	int swappiness_fd, reclaim_fd; /* -1: it has no such file, or we may not write there */
	bool first;
	uint64_t rests_until_ns;
} files = {.swappiness_fd = -1, .reclaim_fd = -1};

#define F (&files)

static int open_for_writing(const char *cgroup, const char *name)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof(path), "%s/%s", cgroup, name);
	return iswf_own_fd(open(path, O_WRONLY | O_CLOEXEC));
}

void iswf_files_open(const char *cgroup)
{
	F->first = false;
	F->swappiness_fd = open_for_writing(cgroup, "memory.swappiness");
	F->reclaim_fd = open_for_writing(cgroup, "memory.reclaim");
}

void iswf_files_close(void)
{
	iswf_close_own(F->swappiness_fd);
	iswf_close_own(F->reclaim_fd);
	F->swappiness_fd = F->reclaim_fd = -1;
}

static void set_swappiness(const char *text)
{
	if (F->swappiness_fd >= 0)
		(void)!pwrite(F->swappiness_fd, text, strlen(text), 0);
}

/* Of files alone, since Linux 6.9; the first try tells. */
static void reclaim(int64_t bytes)
{
	char text[48];
	int length = snprintf(text, sizeof(text), "%lld swappiness=0", (long long)bytes);

	if (pwrite(F->reclaim_fd, text, (size_t)length, 0) >= 0)
		return;
	F->rests_until_ns = iswf_now_ns() + RESTS_NS;
	if (errno != EINVAL)
		return;
	iswf_close_own(F->reclaim_fd);
	F->reclaim_fd = -1;
}

void iswf_files_first(bool first, int64_t excess_bytes)
{
	if (first != F->first)
		set_swappiness(first ? "1" : SWAPPINESS);
	F->first = first;
	if (first && excess_bytes > 0 && F->reclaim_fd >= 0 && iswf_now_ns() > F->rests_until_ns)
		reclaim(excess_bytes);
}
