/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the job's memory may be at home: the least that the limits of its cgroup and of that
 * one's ancestors leave beside everything else there, page tables and locked memory among it. Page
 * cache is not counted, since it goes first; while more of the job's files are read again for that
 * (or of what the kernel has swapped out) than comes back from far, more is left to the kernel, and
 * less while it is the other way round.
 *
 * The kernel itself would swap the program's memory out to keep files that it has read once. Then
 * usage falls, more seems to be free, and the same bytes leave and come by both ways. So what is
 * home and in swap counts as used, and files are reclaimed ahead of need: by us, where cgroups are
 * of version 2, which have no swappiness (version 1: infiniswap/cli/run/files_first.py).
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
#define PATH_BYTES       1024u
#define LEVELS_MAX       8u
#define LIMITS           2u
#define REFAULTS         2u          /* of files, and of memory that the kernel has swapped out */
#define MARGIN_BYTES     (8ll << 20) /* what others may take between two looks */
#define BUDGET_PAGES_MIN (4 * (int64_t)ISWF_BLOCK_PAGES)
#define NO_LIMIT         (1ll << 60) /* and above: bytes */
#define AGAIN_MAX        64u         /* pages in FILES_NS that come back: too few to tell */
#define FILES_NS         50000000ull
#define FILES_STEP_BYTES (4ll << 20)
#define FILES_BACK_BYTES (256ll << 10)
#define FILES_CALM_NS    2000000000ull
#define FILES_BYTES_MAX  (160ll << 20)
#define FILES_SHARE      4
/* With less, other memory of the job should go as the kernel sees fit. */
#define RECLAIM_HELD_BYTES_MIN (32ll << 20)
/* So long after a reclaim that found too little: such a one takes long. */
#define RECLAIM_RESTS_NS  200000000ull
#define RECLAIM_BYTES_MAX (4ll << 20)
#define SWEEP_BLOCKS      16u /* that one look asks the kernel about */
#define SWEEP_VISITS      64u /* while the lock is held */
#define SWEEP_LOOKS       128u
#define REFAULTS_UNKNOWN  UINT64_MAX
/* With less than this share of the least limit the arena is watched: a program takes it while
 * nobody looks. */
#define SCARCE_SHARE     8
#define SCARCE_BYTES_MIN (128ll << 20)

#define A (&iswf_agent)

/* The names of either version of cgroups. */
struct names {
	const char *usage, *limits[LIMITS];
	const char *swap_limit;
	const char *inactive_file, *active_file, *refaults[REFAULTS]; /* in memory.stat */
};

static const struct names versions[] = {
	{"memory.usage_in_bytes",
	 {"memory.limit_in_bytes", NULL},
	 "memory.memsw.limit_in_bytes",
	 "total_inactive_file ",
	 "total_active_file ",
	 {"total_workingset_refault_file ", "total_workingset_refault_anon "}},
	{"memory.current",
	 {"memory.max", "memory.high"},
	 "memory.swap.max",
	 "inactive_file ",
	 "active_file ",
	 {"workingset_refault_file ", "workingset_refault_anon "}},
};

/* The job's cgroup, then those of its ancestors that have a limit when the agent starts. */
struct level {
	int usage_fd, stat_fd, limit_fds[LIMITS];
};

static struct {
	const struct names *names;
	struct level levels[LEVELS_MAX];
	uint32_t levels_count;
	atomic_bool looking, reclaiming; /* one thread at a time */
	uint64_t looked_ns;
	int64_t left_bytes;
	int64_t swapped_pages, sweep_pages; /* of the last sweep, and of this one so far */
	uint32_t sweep_block;
	int reclaim_fd; /* -1: there is no such file, or it is not ours to write */
	uint64_t reclaim_rests_until_ns;
	bool overfull; /* at the last look */
	uint64_t files_looked_ns, disturbed_ns, back_ns;
	uint64_t refaults_last, fetched_last; /* pages */
} budget = {.reclaim_fd = -1};

#define B (&budget)

/* ------------------------------------------------------------------- files */

static int open_file(const char *cgroup, const char *name, int mode)
{
	char path[PATH_BYTES + 64];

	snprintf(path, sizeof(path), "%s/%s", cgroup, name);
	return iswf_own_fd(open(path, mode | O_CLOEXEC));
}

static bool is_there(const char *cgroup, const char *name)
{
	char path[PATH_BYTES + 64];

	snprintf(path, sizeof(path), "%s/%s", cgroup, name);
	return access(path, F_OK) == 0;
}

static bool read_text(int fd, char *text, size_t bytes)
{
	ssize_t got = fd < 0 ? -1 : pread(fd, text, bytes - 1, 0);

	if (got <= 0)
		return false;
	text[got] = '\0';
	return true;
}

static int64_t number_in(const char *stat, const char *name)
{
	size_t bytes = strlen(name);

	for (const char *line = stat; line != NULL;) {
		if (strncmp(line, name, bytes) == 0)
			return (int64_t)strtoull(line + bytes, NULL, 10);
		line = strchr(line, '\n');
		line = line == NULL ? NULL : line + 1;
	}
	return 0;
}

/* The least of its limits in bytes, or NO_LIMIT. */
static int64_t limit_of(const struct level *level)
{
	int64_t least = NO_LIMIT;
	char text[32];

	for (uint32_t i = 0; i < LIMITS; i++) {
		if (!read_text(level->limit_fds[i], text, sizeof(text)) || text[0] == 'm') /* max */
			continue;
		int64_t limit = (int64_t)strtoull(text, NULL, 10);

		if (limit >= 0 && limit < least)
			least = limit;
	}
	return least;
}

/* ------------------------------------------------------------------- levels */

static void close_level(struct level *level)
{
	iswf_close_own(level->usage_fd);
	iswf_close_own(level->stat_fd);
	for (uint32_t i = 0; i < LIMITS; i++)
		iswf_close_own(level->limit_fds[i]);
}

/* 1: it has a limit; 0: it has none, or no files of limits, and is closed unless it is the job's.
 */
static int open_level(const char *cgroup, struct level *level)
{
	bool is_job = level == B->levels;

	for (uint32_t i = 0; i < LIMITS; i++)
		level->limit_fds[i] = B->names->limits[i] == NULL
					      ? -1
					      : open_file(cgroup, B->names->limits[i], O_RDONLY);
	level->usage_fd = level->stat_fd = -1;
	if (is_job || limit_of(level) < NO_LIMIT) {
		level->usage_fd = open_file(cgroup, B->names->usage, O_RDONLY);
		level->stat_fd = open_file(cgroup, "memory.stat", O_RDONLY);
		if (level->usage_fd >= 0 && level->stat_fd >= 0)
			return 1;
	}
	close_level(level);
	return is_job ? -ENOENT : 0;
}

static bool limits_swap(const char *cgroup)
{
	int fd = open_file(cgroup, B->names->swap_limit, O_RDONLY);
	char text[32];
	bool limits = read_text(fd, text, sizeof(text)) && text[0] != 'm' && /* max */
		      (int64_t)strtoull(text, NULL, 10) < NO_LIMIT;

	iswf_close_own(fd);
	return limits;
}

void iswf_budget_close(void)
{
	iswf_close_own(B->reclaim_fd);
	B->reclaim_fd = -1;
	while (B->levels_count > 0)
		close_level(&B->levels[--B->levels_count]);
}

int iswf_budget_open(const char *cgroup)
{
	char path[PATH_BYTES];

	if (snprintf(path, sizeof(path), "%s", cgroup) >= (int)sizeof(path))
		return -ENAMETOOLONG;
	B->left_bytes = 0;
	B->refaults_last = REFAULTS_UNKNOWN;
	B->reclaim_fd = open_file(path, "memory.reclaim", O_WRONLY);
	B->names = &versions[is_there(path, versions[1].usage)];
	A->swap_is_limited = false;
	do {
		int code = B->levels_count == LEVELS_MAX
				   ? -E2BIG
				   : open_level(path, &B->levels[B->levels_count]);
		char *end = strrchr(path, '/');

		A->swap_is_limited |= limits_swap(path);
		if (code < 0)
			return code;
		B->levels_count += (uint32_t)code;
		if (end == NULL || end == path)
			break;
		*end = '\0';
	} while (is_there(path, "cgroup.procs"));
	(void)iswf_budget_look();
	return 0;
}

/* ------------------------------------------------------------------- looking */

static uint64_t refaults_in(const char *stat)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < REFAULTS; i++)
		sum += (uint64_t)number_in(stat, B->names->refaults[i]);
	return sum;
}

static void leave_kernel(int64_t more_bytes, int64_t most_bytes)
{
	B->left_bytes += more_bytes;
	if (B->left_bytes > most_bytes)
		B->left_bytes = most_bytes;
	if (B->left_bytes < 0)
		B->left_bytes = 0;
}

/*
 * A page that comes back costs about the same from the kernel as from far, so each has too little
 * while more comes back from it than from the other. Where neither does, the kernel needs less.
 */
static void look_at_refaults(uint64_t refaults, int64_t limit, uint64_t now)
{
	int64_t most =
		limit / FILES_SHARE < FILES_BYTES_MAX ? limit / FILES_SHARE : FILES_BYTES_MAX;
	uint64_t fetched = atomic_load(&A->count.pages_in), again, came;
	bool busy;

	if (now - B->files_looked_ns < FILES_NS)
		return;
	B->files_looked_ns = now;
	again = B->refaults_last == REFAULTS_UNKNOWN ? 0 : refaults - B->refaults_last;
	came = fetched - B->fetched_last;
	B->refaults_last = refaults;
	B->fetched_last = fetched;
	busy = again > AGAIN_MAX || came > AGAIN_MAX;
	if (busy)
		B->back_ns = now;
	if (B->overfull)
		return; /* most of that is memory that the kernel has swapped for us */
	if (busy) {
		B->disturbed_ns = now;
		if (again != came)
			leave_kernel(again > came ? FILES_STEP_BYTES : -FILES_STEP_BYTES, most);
	} else if (now - B->disturbed_ns > FILES_CALM_NS) {
		leave_kernel(-FILES_BACK_BYTES, most);
	}
}

/* In bytes. */
struct spare {
	int64_t usable; /* what all levels leave beside page cache; below 0: the job has too much */
	int64_t free, files; /* of the job's own cgroup: until its limit; page cache */
	int64_t held;        /* by us; 0 where nothing may leave */
	int64_t left;        /* to the kernel */
	int64_t least;       /* of usable; with less it is scarce */
};

static void look_at_level(const struct level *level, struct spare *spare, uint64_t now)
{
	static char stat[STAT_BYTES]; /* one thread at a time: see `looking` */
	char text[32];
	int64_t limit = limit_of(level), used, left, files;

	if (limit == NO_LIMIT || !read_text(level->usage_fd, text, sizeof(text)))
		return;
	used = (int64_t)strtoull(text, NULL, 10);
	left = limit - MARGIN_BYTES - used;
	/* With the files it is more still. */
	if (left >= spare->usable || !read_text(level->stat_fd, stat, sizeof(stat)))
		return;
	files = number_in(stat, B->names->inactive_file) + number_in(stat, B->names->active_file);
	if (level == B->levels) {
		look_at_refaults(refaults_in(stat), limit, now);
		spare->free = limit - used;
		spare->files = files;
	}
	if (left + files >= spare->usable)
		return;
	spare->usable = left + files;
	spare->least =
		limit / SCARCE_SHARE < SCARCE_BYTES_MIN ? SCARCE_BYTES_MIN : limit / SCARCE_SHARE;
}

/* The next block of the sweep that has pages at home; ISWF_NONE: not among those looked at. */
static uint32_t next_of_sweep(bool *ends_out)
{
	uint32_t found = ISWF_NONE;

	pthread_mutex_lock(&A->lock);
	for (uint32_t i = 0; i < SWEEP_VISITS && found == ISWF_NONE; i++) {
		if (B->sweep_block >= A->blocks_used)
			break;
		if (iswf_mask_any(&A->blocks[B->sweep_block].home))
			found = B->sweep_block;
		B->sweep_block++;
	}
	*ends_out = B->sweep_block >= A->blocks_used;
	pthread_mutex_unlock(&A->lock);
	return found;
}

/* Goes on counting which pages at home the kernel has in swap: they come back to where they are. */
static void sweep(void)
{
	uint64_t blocks = SWEEP_BLOCKS;
	bool ends = false;

	/* Where there are some, the count is renewed about twice a second. */
	if (B->swapped_pages + B->sweep_pages != 0)
		blocks += (uint64_t)A->budget_pages / ISWF_BLOCK_PAGES / SWEEP_LOOKS;
	for (uint64_t i = 0; i < blocks && !ends; i++) {
		uint32_t block = next_of_sweep(&ends);

		if (block != ISWF_NONE)
			B->sweep_pages += iswf_swapped_pages(iswf_at(block));
	}
	if (!ends)
		return;
	B->swapped_pages = B->sweep_pages;
	B->sweep_pages = 0;
	B->sweep_block = 0;
}

/*
 * Files alone, some at a time, where the limit is near and the job has more of them than is left to
 * the kernel. Since Linux 6.9; the first try tells.
 */
static void reclaim_files(const struct spare *spare, uint64_t now)
{
	int64_t bytes = MARGIN_BYTES - spare->free;
	int64_t most = spare->files - spare->left - MARGIN_BYTES / 2;
	char text[48];
	int length;

	if (B->reclaim_fd < 0 || now < B->reclaim_rests_until_ns || bytes < MARGIN_BYTES / 2 ||
	    spare->held < RECLAIM_HELD_BYTES_MIN)
		return;
	bytes = bytes < RECLAIM_BYTES_MAX ? bytes : RECLAIM_BYTES_MAX;
	bytes = bytes < most ? bytes : most;
	if (bytes <= 0)
		return;
	length = snprintf(text, sizeof(text), "%lld swappiness=0", (long long)bytes);
	if (pwrite(B->reclaim_fd, text, (size_t)length, 0) >= 0)
		return;
	B->reclaim_rests_until_ns = iswf_now_ns() + RECLAIM_RESTS_NS;
	if (errno != EINVAL)
		return;
	iswf_close_own(B->reclaim_fd);
	B->reclaim_fd = -1;
}

static struct spare look(uint64_t now)
{
	struct spare spare = {.usable = NO_LIMIT, .free = NO_LIMIT};

	if (A->arena != NULL)
		sweep();
	/* Nothing slow lies between reading what is used and what of it is held. */
	for (uint32_t i = 0; i < B->levels_count; i++)
		look_at_level(&B->levels[i], &spare, now);
	pthread_mutex_lock(&A->lock);
	A->budget_pages = A->held_pages - B->swapped_pages +
			  (spare.usable - B->left_bytes) / (int64_t)ISWF_PAGE_BYTES;
	if (A->budget_pages < BUDGET_PAGES_MIN)
		A->budget_pages = BUDGET_PAGES_MIN;
	A->scarce = spare.usable - B->left_bytes < spare.least;
	iswf_pause_look(now, B->back_ns);
	B->overfull = A->overfull;
	spare.left = B->left_bytes;
	spare.held =
		iswf_rests() || iswf_keeps_all(now) ? 0 : A->held_pages * (int64_t)ISWF_PAGE_BYTES;
	pthread_mutex_unlock(&A->lock);
	return spare;
}

bool iswf_budget_look(void)
{
	struct spare spare;
	uint64_t now;

	if (atomic_exchange(&B->looking, true))
		return false;
	now = iswf_now_ns();
	if (now - B->looked_ns < LOOK_NS) {
		atomic_store(&B->looking, false);
		return false;
	}
	spare = look(now);
	B->looked_ns = iswf_now_ns();
	atomic_store(&B->looking, false);
	/* That may take long: the others look meanwhile. */
	if (!atomic_exchange(&B->reclaiming, true)) {
		reclaim_files(&spare, now);
		atomic_store(&B->reclaiming, false);
	}
	return true;
}
