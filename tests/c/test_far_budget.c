/* SPDX-License-Identifier: Apache-2.0 */
/* How much of a job's memory may be at home, from the files of a cgroup and of the one above it. */
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"
#define OWN_MAIN
#include "check.h"
#include "tests.h"

#define MIB          (1ll << 20)
#define NONE         (-1)
#define TURN         5000000ull  /* later than the last look */
#define CALM         60000000ull /* later than the last look at refaults */
#define BLOCKS       40u         /* two looks and a part: a sweep of those at home */
#define PAGES(bytes) ((bytes) / (int64_t)ISWF_PAGE_BYTES)

struct iswf_agent iswf_agent = {.lock = PTHREAD_MUTEX_INITIALIZER};

static uint64_t now_ns = 1, back_ns;
static uint32_t swapped_pages;
static char top[] = "/tmp/isw-budget-XXXXXX", job[64];

uint64_t iswf_now_ns(void)
{
	return now_ns;
}

int iswf_own_fd(int fd)
{
	return fd;
}

void iswf_close_own(int fd)
{
	if (fd >= 0)
		close(fd);
}

bool iswf_mask_any(const struct iswf_mask *mask)
{
	return mask->word[0] != 0;
}

void iswf_pause_look(uint64_t now, uint64_t ns)
{
	CHECK_EQ(now, now_ns);
	back_ns = ns;
}

uint32_t iswf_swapped_pages(const char *at)
{
	uint32_t block = (uint32_t)((at - iswf_agent.arena) / ISWF_BLOCK_BYTES);

	CHECK(block < BLOCKS && iswf_agent.blocks[block].home.word[0] != 0);
	return swapped_pages;
}

static void write_file(const char *cgroup, const char *name, const char *format, ...)
{
	char path[128], text[256];
	va_list args;
	int fd;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	snprintf(path, sizeof(path), "%s/%s", cgroup, name);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	CHECK(fd >= 0);
	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
}

/* One with a limit (NONE: without), so much used, of which so much is page cache. */
static void write_cgroup(const char *cgroup, int64_t limit, int64_t used, int64_t cache)
{
	write_file(cgroup, "cgroup.procs", "");
	write_file(cgroup, "memory.max", limit == NONE ? "max\n" : "%lld\n", (long long)limit);
	write_file(cgroup, "memory.high", "max\n");
	write_file(cgroup, "memory.current", "%lld\n", (long long)used);
	write_file(cgroup, "memory.stat", "active_file %lld\ninactive_file %lld\n",
		   (long long)cache / 2, (long long)(cache - cache / 2));
}

static void refault(int64_t used, uint64_t pages)
{
	static uint64_t total;

	total += pages;
	write_file(job, "memory.current", "%lld\n", (long long)used);
	write_file(job, "memory.stat",
		   "active_file 0\ninactive_file 0\nworkingset_refault_file %llu\n",
		   (unsigned long long)total);
}

static int64_t look(void)
{
	now_ns += TURN;
	CHECK(iswf_budget_look());
	CHECK(!iswf_budget_look()); /* not twice in a moment */
	return iswf_agent.budget_pages;
}

static void begin(int64_t limit, int64_t limit_above, int64_t used, int64_t cache)
{
	iswf_agent.held_pages = PAGES(100 * MIB);
	write_cgroup(top, limit_above, used, cache);
	write_cgroup(job, limit, used, cache);
	now_ns += TURN;
	CHECK_EQ(iswf_budget_open(job), 0);
}

/* What is used beyond the cache counts; a part of the limit stays free. */
TEST(the_least_limit_of_all_levels_counts)
{
	begin(1024 * MIB, NONE, 400 * MIB, 100 * MIB);
	CHECK_EQ(look(), PAGES((100 + 1024 - 8 - 300) * MIB));
	iswf_budget_close();
	begin(1024 * MIB, 512 * MIB, 400 * MIB, 100 * MIB);
	CHECK_EQ(look(), PAGES((100 + 512 - 8 - 300) * MIB));
	iswf_budget_close();
	begin(NONE, 512 * MIB, 400 * MIB, 0);
	CHECK_EQ(look(), PAGES((100 + 512 - 8 - 400) * MIB));
	iswf_budget_close();
}

/* The arena is watched before the limit is met: at an eighth, or below 128 MiB. */
TEST(what_is_left_is_scarce_before_it_is_nothing)
{
	begin(1024 * MIB, NONE, (1024 - 8 - 128) * MIB, 0);
	(void)look();
	CHECK(!iswf_agent.scarce);
	write_file(job, "memory.current", "%lld\n", (1024 - 8 - 127) * MIB);
	(void)look();
	CHECK(iswf_agent.scarce);
	iswf_budget_close();
	begin(64 * 1024 * MIB, NONE, 57 * 1024 * MIB, 0);
	(void)look();
	CHECK(iswf_agent.scarce);
	iswf_budget_close();
	begin(NONE, NONE, 64 * 1024 * MIB, 0);
	(void)look();
	CHECK(!iswf_agent.scarce);
	iswf_budget_close();
}

/* Of the least limit that `run` takes, most is the job's. */
TEST(a_small_limit_is_not_all_margin)
{
	iswf_agent.held_pages = 0;
	begin(64 * MIB, NONE, 20 * MIB, 0);
	iswf_agent.held_pages = 0;
	CHECK_EQ(look(), PAGES((64 - 8 - 20) * MIB));
	/* Below 8 MiB there is no paging by blocks: the kernel swaps. */
	write_file(job, "memory.current", "%lld\n", 63 * MIB);
	CHECK_EQ(look(), PAGES(8 * MIB));
	iswf_budget_close();
}

/* Files that are read again get more, a quarter of the limit at most; what is calm gives back. */
TEST(refaults_leave_the_kernel_more)
{
	int64_t before, after;

	begin(64 * MIB, NONE, 20 * MIB, 0);
	iswf_agent.held_pages = 0;
	before = look();
	for (uint32_t i = 0; i < 40; i++) {
		refault(20 * MIB, 1000);
		now_ns += CALM;
		after = look();
	}
	CHECK_EQ(before - after, PAGES(16 * MIB));
	for (uint32_t i = 0; i < 200; i++) {
		refault(20 * MIB, 1);
		now_ns += CALM;
		after = look();
	}
	CHECK_EQ(before, after);
	iswf_budget_close();
}

/* The files are read again as ever, but more comes back from far: then that has too little. */
TEST(what_comes_back_from_far_leaves_the_kernel_less)
{
	int64_t before, after = 0;

	begin(64 * MIB, NONE, 20 * MIB, 0);
	iswf_agent.held_pages = 0;
	before = look();
	for (uint32_t i = 0; i < 40; i++) {
		refault(20 * MIB, 1000);
		iswf_agent.count.pages_in += 999;
		now_ns += CALM;
		after = look();
	}
	CHECK_EQ(before - after, PAGES(16 * MIB));
	for (uint32_t i = 1; i <= 4; i++) {
		refault(20 * MIB, 1000);
		iswf_agent.count.pages_in += 1001;
		now_ns += CALM;
		CHECK_EQ(look(), after + PAGES(i * 4 * MIB));
	}
	for (uint32_t i = 0; i < 40; i++) {
		refault(20 * MIB, 0);
		iswf_agent.count.pages_in += 1000;
		now_ns += CALM;
		CHECK_EQ(look(), before);
	}
	iswf_budget_close();
}

/* Else more would seem free the more of the job the kernel swaps out. */
TEST(what_is_home_and_in_swap_counts_as_used)
{
	static struct iswf_block blocks[BLOCKS];
	static char arena[BLOCKS]; /* its addresses alone */
	int64_t before;

	begin(64 * MIB, NONE, 20 * MIB, 0);
	now_ns += CALM; /* refaults are looked at */
	before = look();
	for (uint32_t i = 0; i < BLOCKS; i++)
		blocks[i].home.word[0] = i != 7; /* that one is far */
	iswf_agent.arena = arena;
	iswf_agent.blocks = blocks;
	iswf_agent.blocks_used = BLOCKS - 1;
	swapped_pages = 10;
	CHECK_EQ(look(), before); /* so many at a time */
	CHECK_EQ(look(), before);
	CHECK_EQ(look(), before - 10 * (int64_t)(BLOCKS - 2));
	swapped_pages = 0;
	CHECK_EQ(look(), before - 10 * (int64_t)(BLOCKS - 2));
	CHECK_EQ(look(), before - 10 * (int64_t)(BLOCKS - 2));
	CHECK_EQ(look(), before);
	iswf_agent.arena = NULL;
	iswf_agent.blocks_used = 0;
	iswf_budget_close();
}

static void remove_file(const char *cgroup, const char *name)
{
	char path[128];

	snprintf(path, sizeof(path), "%s/%s", cgroup, name);
	unlink(path);
}

static bool says(const char *name, const char *wanted)
{
	char path[128], text[64] = "";
	int fd;

	snprintf(path, sizeof(path), "%s/%s", job, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0);
	CHECK(read(fd, text, sizeof(text) - 1) >= 0);
	close(fd);
	write_file(job, name, "");
	return strcmp(text, wanted) == 0;
}

/* By a reclaim ahead of need, which leaves what the kernel is left, and never more at once. */
TEST(files_go_before_the_programs_memory)
{
	write_file(job, "memory.reclaim", "");
	begin(512 * MIB, 512 * MIB, 500 * MIB, 350 * MIB); /* 150 MiB beside files; 100 are ours */
	CHECK(says("memory.reclaim", ""));
	write_file(top, "memory.current", "%lld\n", 512 * MIB); /* others' files, say */
	look();
	CHECK(says("memory.reclaim", ""));
	write_cgroup(job, 512 * MIB, 508 * MIB, 350 * MIB);
	look();
	CHECK(says("memory.reclaim", "4194304 swappiness=0"));
	write_cgroup(job, 512 * MIB, 508 * MIB, 5 * MIB);
	look();
	CHECK(says("memory.reclaim", "1048576 swappiness=0"));
	write_cgroup(job, 512 * MIB, 508 * MIB, 4 * MIB);
	look();
	CHECK(says("memory.reclaim", ""));
	now_ns += CALM; /* files are read again, so some are left to the kernel: 4 MiB */
	write_cgroup(job, 512 * MIB, 508 * MIB, 0);
	refault(508 * MIB, 1000);
	look();
	write_file(job, "memory.stat", "active_file %lld\ninactive_file 0\n", 9 * MIB);
	look();
	CHECK(says("memory.reclaim", "1048576 swappiness=0"));
	write_cgroup(job, 512 * MIB, 508 * MIB, 350 * MIB);
	iswf_agent.held_pages = PAGES(31 * MIB); /* hardly any of it is ours */
	look();
	CHECK(says("memory.reclaim", ""));
	iswf_agent.held_pages = PAGES(100 * MIB);
	iswf_agent.full_until_ns = now_ns + CALM; /* nothing can leave */
	look();
	CHECK(says("memory.reclaim", ""));
	iswf_agent.full_until_ns = 0;
	iswf_budget_close();
	remove_file(job, "memory.reclaim");
	begin(512 * MIB, NONE, 508 * MIB, 400 * MIB); /* before version 2, or Linux 5.19 */
	look();
	iswf_budget_close();
}

/* At any level: what the host has free is not what the job may use. */
TEST(a_limit_of_swap_is_seen)
{
	write_file(job, "memory.swap.max", "max\n");
	begin(512 * MIB, NONE, 100 * MIB, 0);
	CHECK(!iswf_agent.swap_is_limited);
	iswf_budget_close();
	write_file(top, "memory.swap.max", "1048576\n");
	begin(512 * MIB, NONE, 100 * MIB, 0);
	CHECK(iswf_agent.swap_is_limited);
	iswf_budget_close();
	remove_file(top, "memory.swap.max");
	remove_file(job, "memory.swap.max");
}

/* While the kernel swaps for the program, what comes back says nothing of files. */
TEST(a_pause_is_told_what_comes_back)
{
	int64_t before;

	begin(512 * MIB, NONE, 500 * MIB, 0);
	refault(500 * MIB, 0);
	now_ns += CALM;
	(void)look();
	before = look();
	iswf_agent.overfull = true;
	(void)look(); /* it learns of it */
	for (uint32_t i = 0; i < 3; i++) {
		refault(500 * MIB, 1000);
		now_ns += CALM;
		(void)look();
		CHECK_EQ(back_ns, now_ns);
	}
	CHECK_EQ(look(), before);
	refault(500 * MIB, 10);
	now_ns += CALM;
	(void)look();
	CHECK(back_ns < now_ns);                            /* that is not much */
	atomic_fetch_add(&iswf_agent.count.pages_in, 1000); /* nor is it over while blocks come */
	now_ns += CALM;
	(void)look();
	CHECK_EQ(back_ns, now_ns);
	iswf_agent.overfull = false;
	(void)look();
	refault(500 * MIB, 1000);
	now_ns += CALM;
	CHECK_EQ(look(), before - PAGES(4 * MIB));
	iswf_budget_close();
}

static void remove_files(const char *cgroup)
{
	static const char *const names[] = {"cgroup.procs", "memory.max", "memory.high",
					    "memory.current", "memory.stat"};
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		remove_file(cgroup, names[i]);
	rmdir(cgroup);
}

int main(void)
{
	int code;

	CHECK(mkdtemp(top) != NULL);
	snprintf(job, sizeof(job), "%s/job", top);
	CHECK_EQ(mkdir(job, 0700), 0);
	code = run_tests();
	remove_files(job);
	remove_files(top);
	return code;
}
