/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent's life in a process: programs (far_life.c) with the agent preloaded, and a device of
 * the test's own. The agent is told that its cgroup is full, by files that say so, and so evicts
 * all that it can all the time; no limit is in force.
 *
 *     test_far_life [CASE]
 */
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "far_program.h"
#include "far_stand_in.h"

#define MIB       (1ull << 20)
#define LIMIT     (256 * MIB)
#define NONE      9223372036854771712ull /* as version 1 says that there is no limit */
#define PAGES_MIN 4096u                  /* of the 8192 that a program has */
#define STAT_1    "total_inactive_file 0\ntotal_active_file 0\ntotal_workingset_refault_file 0\n"
#define STAT_2    "inactive_file 0\nactive_file 0\nworkingset_refault_file 0\n"

static char base[64], cgroup[128];

/* ------------------------------------------------------------------- cgroups */

static void write_file(const char *directory, const char *name, const char *text)
{
	char path[256];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	CHECK(fd >= 0);
	CHECK_EQ(fchmod(fd, 0644), 0);
	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
}

static void write_number(const char *directory, const char *name, unsigned long long number)
{
	char text[32];

	snprintf(text, sizeof(text), "%llu\n", number);
	write_file(directory, name, text);
}

static void make_level(const char *directory)
{
	CHECK_EQ(mkdir(directory, 0755), 0);
	CHECK_EQ(chmod(directory, 0755), 0);
	write_file(directory, "cgroup.procs", "");
}

static void make_v1(const char *directory, unsigned long long limit, unsigned long long usage)
{
	make_level(directory);
	write_number(directory, "memory.limit_in_bytes", limit);
	write_number(directory, "memory.usage_in_bytes", usage);
	write_file(directory, "memory.stat", STAT_1);
}

static void make_v2(const char *directory, const char *max, const char *high,
		    unsigned long long usage)
{
	make_level(directory);
	write_file(directory, "memory.max", max);
	write_file(directory, "memory.high", high);
	write_number(directory, "memory.current", usage);
	write_file(directory, "memory.stat", STAT_2);
}

static void remove_level(const char *directory)
{
	static const char *const names[] = {
		"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "memory.max",
		"memory.high",           "memory.current",        "cgroup.procs"};
	char path[256];

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		snprintf(path, sizeof(path), "%s/%s", directory, names[i]);
		unlink(path);
	}
	CHECK_EQ(rmdir(directory), 0);
}

/* ------------------------------------------------------------------- programs */

static struct job start_job(const char *name, const struct stand_in *device)
{
	char *argv[] = {"far_life", (char *)(uintptr_t)name, NULL};

	return start_program(ISW_FAR_LIFE, argv, cgroup, device->job_end);
}

static void pause_ms(long ms)
{
	const struct timespec time = {.tv_nsec = ms * 1000000};

	nanosleep(&time, NULL);
}

static void go(bool now)
{
	if (now)
		write_file(base, "go", "");
	else
		unlink("go");
}

static struct stand_in_counts run(const char *name)
{
	struct stand_in device;
	struct job job;

	printf("%s\n", name);
	fflush(stdout);
	stand_in_start(&device);
	job = start_job(name, &device);
	CHECK_EQ(end_of(&job), 0);
	return stand_in_stop(&device);
}

static uint32_t offs(const struct stand_in_counts *counts)
{
	uint32_t sum = 0;

	for (uint32_t i = 0; i < ISWF_OFFS; i++)
		sum += counts->offs[i];
	return sum;
}

/* Each of so many programs has had an agent, and memory that was away. */
static struct stand_in_counts has_agents(const char *name, uint32_t agents)
{
	struct stand_in_counts counts = run(name);

	CHECK_EQ(counts.hellos, agents);
	CHECK_EQ(offs(&counts), 0);
	CHECK(counts.out >= agents * PAGES_MIN && counts.pages_read > 0);
	CHECK(counts.in > 0);
	CHECK_EQ(counts.lost, 0);
	return counts;
}

/* All that was far came home, and stays there. */
static void has_agent_until(const char *name)
{
	struct stand_in_counts counts = has_agents(name, 1);

	CHECK(counts.back[ISWF_WHY_ENDED] >= PAGES_MIN);
}

/* The program goes on without an agent, of which nothing is left; the device is told why. */
static void has_none(const char *name, enum iswf_off off)
{
	struct stand_in_counts counts = run(name);

	CHECK_EQ(counts.out, 0);
	CHECK_EQ(offs(&counts), off != ISWF_OFF_NONE);
	CHECK_EQ(counts.offs[off], off != ISWF_OFF_NONE);
}

/* ------------------------------------------------------------------- cases */

static void programs_begin_anew(void)
{
	struct stand_in_counts counts = has_agents("exec", 5);

	CHECK(counts.back[ISWF_WHY_FORK] >= PAGES_MIN);
	counts = has_agents("fork", 2);
	CHECK(counts.back[ISWF_WHY_FORK] >= PAGES_MIN);
	(void)has_agents("handlers-of-forks", 1);
	(void)has_agents("raw-fork", 1);
	(void)has_agents("vfork-first", 1);
}

static void descriptors_are_kept(void)
{
	(void)has_agents("closes", 2);
	has_none("other-descriptors", ISWF_OFF_NONE);
}

static void signals_and_stacks(void)
{
	(void)has_agents("signals", 1);
	(void)has_agents("small-stack", 1);
	(void)has_agents("far-stacks", 1);
	(void)has_agents("threads", 1);
	(void)has_agents("main-leaves", 1);
}

static void limits_refuse(void)
{
	if (geteuid() == 0)
		has_none("no-threads", ISWF_OFF_THREADS);
	has_none("locked", ISWF_OFF_LOCKED);
	has_none("in-sandbox", ISWF_OFF_SANDBOX);
	has_none("few-addresses", ISWF_OFF_ADDRESSES);
	has_none("little-data", ISWF_OFF_ADDRESSES);
	(void)has_agents("many-addresses", 1);
	has_none("unset", ISWF_OFF_NONE);
	has_agent_until("sandbox");
	has_agent_until("locks-all");
	has_agent_until("locks-all-again");
}

static void a_device_that_cannot_serve(void)
{
	static const struct {
		enum stand_in_mood mood;
		enum iswf_off off; /* what the agent then says; who is full has counted it */
	} cases[] = {
		{STAND_IN_FULL, ISWF_OFF_NONE},
		{STAND_IN_SILENT, ISWF_OFF_DEVICE},
		{STAND_IN_OTHER, ISWF_OFF_VERSION},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		const bool says = cases[i].off != ISWF_OFF_NONE;
		struct stand_in_counts counts;
		struct stand_in device;
		struct job job;

		stand_in_start(&device);
		stand_in_set(&device, cases[i].mood);
		job = start_job("without", &device);
		CHECK_EQ(end_of(&job), 0);
		while (says && stand_in_counts(&device).offs[cases[i].off] == 0)
			pause_ms(1);
		counts = stand_in_stop(&device);
		CHECK_EQ(offs(&counts), says);
	}
}

/* The device's process dies, is gone for a while, and another one has the blocks. */
static void a_device_that_returns(const char *name, uint32_t deaths)
{
	struct stand_in_counts counts;
	struct stand_in device;
	struct job job;

	go(false);
	stand_in_start(&device);
	job = start_job(name, &device);
	wait_for_word(&job);
	stand_in_speak(&device); /* that is no end */
	for (uint32_t i = 1; i <= deaths; i++) {
		pause_ms(20);
		stand_in_set(&device, STAND_IN_DEAD);
		pause_ms(20);
		if (i == deaths)
			go(true);
		pause_ms(20);
		stand_in_set(&device, STAND_IN_SERVES);
		while (stand_in_counts(&device).returns < i)
			pause_ms(1);
	}
	CHECK_EQ(end_of(&job), 0);
	counts = stand_in_stop(&device);
	CHECK_EQ(counts.hellos, 1);
	CHECK_EQ(counts.returns, deaths);
	CHECK(counts.out >= PAGES_MIN && counts.pages_read > 0);
	CHECK_EQ(counts.lost, 0);
}

/* Nobody has the blocks any more: a page of them is SIGBUS, and no thread waits for ever. */
static void a_device_that_is_gone(void)
{
	struct stand_in device;
	struct job job;
	int status;

	go(false);
	stand_in_start(&device);
	job = start_job("waits", &device);
	wait_for_word(&job);
	stand_in_set(&device, STAND_IN_DEAD);
	pause_ms(100); /* it waits for a successor */
	pthread_mutex_lock(&device.lock);
	close(device.job);
	device.job = -1;
	pthread_mutex_unlock(&device.lock);
	go(true);
	status = end_of(&job);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
	(void)stand_in_stop(&device);
}

/* What counts is what is left under all limits above. */
static void every_ancestor_counts(void)
{
	char outer[128], standard[sizeof(cgroup)];
	struct stand_in_counts counts;

	strcpy(standard, cgroup);
	snprintf(outer, sizeof(outer), "%s/outer", base);
	snprintf(cgroup, sizeof(cgroup), "%s/outer/inner", base);
	make_v1(outer, LIMIT, LIMIT - 8 * MIB);
	make_v1(cgroup, NONE, 0);
	(void)has_agents("plain", 1);
	write_number(outer, "memory.usage_in_bytes", 64 * MIB);
	counts = run("plain");
	CHECK_EQ(counts.hellos, 1);
	CHECK_EQ(counts.out, 0);
	remove_level(cgroup);
	remove_level(outer);

	make_v2(outer, "max\n", "268435456\n", LIMIT - 8 * MIB);
	make_v2(cgroup, "1073741824\n", "max\n", 0);
	(void)has_agents("plain", 1);
	write_file(outer, "memory.high", "max\n");
	counts = run("plain");
	CHECK_EQ(counts.hellos, 1);
	CHECK_EQ(counts.out, 0);
	remove_level(cgroup);
	remove_level(outer);

	has_none("without", ISWF_OFF_CGROUP);
	strcpy(cgroup, standard);
}

static bool kernel_moves(void)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = {.api = UFFD_API, .features = 1 << 16};
	bool moves = fd >= 0 && ioctl(fd, UFFDIO_API, &api) == 0;

	if (fd >= 0)
		close(fd);
	return moves;
}

int main(int argc, char **argv)
{
	if (!kernel_moves())
		SKIP("needs userfaultfd with MOVE (Linux 6.8)");
	/* Programs get no more than what is meant for them. */
	CHECK_EQ(close_range(3, ~0u, CLOSE_RANGE_CLOEXEC), 0);
	strcpy(base, "/tmp/isw-life-XXXXXX");
	CHECK(mkdtemp(base) != NULL);
	CHECK_EQ(chmod(base, 0755), 0);
	CHECK_EQ(chdir(base), 0);
	snprintf(cgroup, sizeof(cgroup), "%s/job", base);
	make_v1(cgroup, LIMIT, LIMIT - 8 * MIB);
	if (argc == 2) {
		(void)run(argv[1]);
	} else {
		programs_begin_anew();
		descriptors_are_kept();
		signals_and_stacks();
		limits_refuse();
		a_device_that_cannot_serve();
		a_device_that_returns("waits", 3);
		a_device_that_returns("full-of-descriptors", 2);
		a_device_that_is_gone();
		every_ancestor_counts();
	}
	go(false);
	remove_level(cgroup);
	CHECK_EQ(chdir("/"), 0);
	CHECK_EQ(rmdir(base), 0);
	return 0;
}
