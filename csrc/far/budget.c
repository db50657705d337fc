/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the job's memory may be at home: what its cgroup's limit leaves beside everything
 * else there. Page cache is not counted, since the kernel takes it first; when the job's files are
 * read again and again for that, more is left to them.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define LOOK_NS          4000000ull
#define STAT_BYTES       8192u
#define MARGIN_SHARE     16u
#define MARGIN_BYTES_MIN (12ull << 20)
#define MARGIN_BYTES_MAX (48ull << 20)
#define BUDGET_PAGES_MIN (8 * (int64_t)ISWF_BLOCK_PAGES)
#define REFAULTS_MAX     64u /* pages in FILES_NS: files are read again */
#define FILES_NS         50000000ull
#define FILES_STEP_BYTES (4ull << 20)
#define FILES_BACK_BYTES (256ull << 10)
#define FILES_CALM_NS    2000000000ull
#define FILES_BYTES_MAX  (160ull << 20)
#define REFAULTS_UNKNOWN UINT64_MAX

#define A (&iswf_agent)

static struct {
	int stat_fd, usage_fd;
	uint64_t limit_bytes, margin_bytes;
	const char *inactive_file, *active_file, *refaults; /* names in `stat` */
	atomic_uint_fast64_t looked_ns;
	uint64_t files_bytes, files_looked_ns, disturbed_ns, refaults_last;
} budget = {.stat_fd = -1, .usage_fd = -1, .refaults_last = REFAULTS_UNKNOWN};

#define B (&budget)

static int open_file(const char *cgroup, const char *name)
{
	char path[512];

	if (snprintf(path, sizeof(path), "%s/%s", cgroup, name) >= (int)sizeof(path))
		return -ENAMETOOLONG;
	return iswf_own_fd(open(path, O_RDONLY | O_CLOEXEC));
}

int iswf_budget_open(uint64_t limit_bytes, int version, const char *cgroup)
{
	uint64_t margin = limit_bytes / MARGIN_SHARE;

	B->limit_bytes = limit_bytes;
	B->margin_bytes = margin < MARGIN_BYTES_MIN   ? MARGIN_BYTES_MIN
			  : margin > MARGIN_BYTES_MAX ? MARGIN_BYTES_MAX
						      : margin;
	B->inactive_file = version == 1 ? "total_inactive_file " : "inactive_file ";
	B->active_file = version == 1 ? "total_active_file " : "active_file ";
	B->refaults = "workingset_refault_file ";
	B->stat_fd = open_file(cgroup, "memory.stat");
	B->usage_fd = open_file(cgroup, version == 1 ? "memory.usage_in_bytes" : "memory.current");
	if (B->stat_fd < 0 || B->usage_fd < 0)
		return B->stat_fd < 0 ? B->stat_fd : B->usage_fd;
	(void)iswf_budget_look();
	return 0;
}

static uint64_t number_in(const char *stat, const char *name)
{
	size_t bytes = strlen(name);

	for (const char *line = stat; line != NULL;) {
		if (strncmp(line, name, bytes) == 0)
			return strtoull(line + bytes, NULL, 10);
		line = strchr(line, '\n');
		line = line == NULL ? NULL : line + 1;
	}
	return 0;
}

static bool read_text(int fd, char *text, size_t bytes)
{
	ssize_t got = pread(fd, text, bytes - 1, 0);

	if (got <= 0)
		return false;
	text[got] = '\0';
	return true;
}

/* Leaves the files more while they are read again, and slowly less afterwards. */
static void look_at_files(uint64_t refaults, uint64_t now)
{
	if (now - B->files_looked_ns < FILES_NS)
		return;
	B->files_looked_ns = now;
	if (B->refaults_last != REFAULTS_UNKNOWN && refaults - B->refaults_last > REFAULTS_MAX) {
		B->disturbed_ns = now;
		if (B->files_bytes < FILES_BYTES_MAX)
			B->files_bytes += FILES_STEP_BYTES;
	} else if (now - B->disturbed_ns > FILES_CALM_NS && B->files_bytes >= FILES_BACK_BYTES) {
		B->files_bytes -= FILES_BACK_BYTES;
	}
	B->refaults_last = refaults;
}

bool iswf_budget_look(void)
{
	static char stat[STAT_BYTES]; /* one thread at a time: see looked_ns */
	char usage[32];
	uint64_t now = iswf_now_ns(), looked = atomic_load(&B->looked_ns);
	int64_t used, spare;

	/* Signed: while one thread looks, the time is in the future. */
	if ((int64_t)(now - looked) < (int64_t)LOOK_NS ||
	    !atomic_compare_exchange_strong(&B->looked_ns, &looked, now + 100 * LOOK_NS))
		return false;
	if (read_text(B->stat_fd, stat, sizeof(stat)) &&
	    read_text(B->usage_fd, usage, sizeof(usage))) {
		used = (int64_t)strtoull(usage, NULL, 10) -
		       (int64_t)number_in(stat, B->inactive_file) -
		       (int64_t)number_in(stat, B->active_file);
		look_at_files(number_in(stat, B->refaults), now);
		spare = (int64_t)(B->limit_bytes - B->margin_bytes - B->files_bytes) - used;
		pthread_mutex_lock(&A->lock);
		A->budget_pages = A->held_pages + spare / (int64_t)ISWF_PAGE_BYTES;
		if (A->budget_pages < BUDGET_PAGES_MIN)
			A->budget_pages = BUDGET_PAGES_MIN;
		pthread_mutex_unlock(&A->lock);
	}
	atomic_store(&B->looked_ns, now);
	return true;
}
