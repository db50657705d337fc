/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Far memory whole: a device's process, a donor over TCP, and a program (far_job.c) with the agent
 * preloaded that knows what must be in its memory. The agent is told that its cgroup is full, by
 * files that say so, and so evicts all that it can all the time; no limit is in force.
 *
 *     test_far_job [SEED [CASE [NUMBER [FREE_MS]]]]
 *     test_far_job run PROGRAM [ARGUMENT...]
 *
 * With FREE_MS the cgroup is empty for so long. The second form runs any program so, with pauses in
 * which nothing leaves, and ends with its exit code.
 */
#include <errno.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "far_device.h"
#include "far_program.h"
#include "frontend/far_table.h"

#define FAR_BYTES (1024 * MIB)
#define STATE_FD  602
#define TABLE_FD  603
#define KEY_FD    604
#define LEDGER_FD 605
#define GO_FD     606
#define SERVED_FD 607
#define LIMIT     (256 * MIB)
#define TURN_MS   40
/* The job's cgroup never fills. */
#define ALWAYS_FREE UINT64_MAX
#define STATISTICS  "total_inactive_file 0\ntotal_active_file 0\ntotal_workingset_refault_file 0\n"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED false
#endif

#if defined(__SANITIZE_THREAD__)
/*
 * A donor reads a page for one connection and takes its next version from another. The program has
 * had the page in between, which is an order that this sanitizer cannot see.
 */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
	return "race:step_payload\n";
}
#endif

static char directory[64];

/* ------------------------------------------------------------------- the job */

static void write_file(const char *name, const char *text)
{
	int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	CHECK(fd >= 0);
	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
}

static void write_usage(uint64_t bytes)
{
	char text[32];

	snprintf(text, sizeof(text), "%llu\n", (unsigned long long)bytes);
	write_file("memory.usage_in_bytes", text);
}

/* A place with the files of a cgroup that is as full as the agent lets one become. */
static void make_directory(void)
{
	char text[32];

	strcpy(directory, "/tmp/isw-far-XXXXXX");
	CHECK(mkdtemp(directory) != NULL);
	CHECK_EQ(chdir(directory), 0);
	write_usage(LIMIT - 8 * MIB);
	snprintf(text, sizeof(text), "%llu\n", LIMIT);
	write_file("memory.limit_in_bytes", text);
	write_file("memory.stat", STATISTICS);
}

static void remove_directory(void)
{
	static const char *const names[] = {"memory.limit_in_bytes", "memory.usage_in_bytes",
					    "memory.stat", "far_job.end"};

	for (size_t i = 0; i < ISWI_ARRAY_LEN(names); i++)
		unlink(names[i]);
	CHECK_EQ(chdir("/"), 0);
	CHECK_EQ(rmdir(directory), 0);
}

static struct job start_job(const char *name, const char *number, int job_end)
{
	char *argv[] = {"far_job", (char *)(uintptr_t)name, (char *)(uintptr_t)number, NULL};

	return start_program(ISW_FAR_JOB, argv, directory, job_end);
}

/* ------------------------------------------------------- in this process's device */

struct device {
	struct far_donor donor;
	isw_engine *engine;
	isw_frontend *frontend;
	int job_end;
};

static void start_device(struct device *d)
{
	struct isw_engine_config config;
	struct isw_error error = {0};
	int key, pair[2], table = memfd_create("table", MFD_CLOEXEC);

	CHECK_OK(isw_seal_key_make(&key, &error), error);
	config = far_engine_config(FAR_BYTES, -1, key);
	make_far_donor(&d->donor, FAR_BYTES);
	CHECK_OK(isw_engine_create(&config, NULL, &d->engine, &error), error);
	close(key);
	use_far_donor(d->engine, &d->donor, false);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	d->frontend = start_far(d->engine, table, pair[0]);
	close(table);
	close(pair[0]);
	d->job_end = pair[1];
}

static uint64_t far_used(const struct device *d)
{
	struct isw_frontend_info info;

	isw_frontend_info(d->frontend, &info);
	return info.used_bytes;
}

static void end_device(struct device *d)
{
	struct isw_engine_stats stats;

	/* When its last process has ended, nothing of the job's is left. */
	for (uint32_t i = 0; far_used(d) != 0; i++) {
		CHECK(i < 10000);
		pause_ms(1);
	}
	isw_engine_stats(d->engine, &stats);
	CHECK_EQ(stats.requests_failed, 0);
	isw_frontend_destroy(d->frontend);
	isw_engine_destroy(d->engine);
	isw_store_destroy(d->donor.store);
	close(d->job_end);
}

/* The program ends well; how much of what it checked has been away. */
static struct isw_engine_stats ends_well(const char *name, const char *number, uint64_t free_ms)
{
	struct device d;
	struct isw_engine_stats stats;
	struct job job;

	start_device(&d);
	write_usage(free_ms != 0 ? 0 : LIMIT - 8 * MIB);
	job = start_job(name, number, d.job_end);
	if (free_ms != 0 && free_ms != ALWAYS_FREE)
		pause_ms((uint32_t)free_ms);
	if (free_ms != ALWAYS_FREE)
		write_usage(LIMIT - 8 * MIB);
	CHECK_EQ(end_of(&job), 0);
	write_usage(LIMIT - 8 * MIB);
	isw_engine_stats(d.engine, &stats);
	printf("%s: %llu MiB out, %llu MiB in\n", name, (unsigned long long)stats.pages_out / 256,
	       (unsigned long long)stats.pages_in / 256);
	end_device(&d);
	return stats;
}

/* Most of it has been away. */
static void passes(const char *name, const char *number)
{
	struct isw_engine_stats stats = ends_well(name, number, 0);

	CHECK(stats.pages_out > 1024 && stats.pages_in > 512);
}

static atomic_bool compacts;

static void *compact(void *arg)
{
	const int *fd = arg;

	while (atomic_load(&compacts))
		CHECK_EQ(write(*fd, "1", 1), 1);
	return NULL;
}

/* What the agent does alone. It carries no sanitizer: once, in the plain build, says all. */
static void every_way_passes(void)
{
	static const char *const ways[] = {
		"fork",     "behind", "protected",  "descriptors",  "spawn",     "laid_over",
		"hole",     "edges",  "locked_all", "policies",     "moved",     "allocator",
		"discards", "wished", "reserved",   "moved-behind", "cancelled", "limited"};

	for (size_t i = 0; i < ISWI_ARRAY_LEN(ways); i++)
		passes(ways[i], "0");
	passes("edges", "1");
	passes("limited", "1");
	passes("limited", "2");
}

/* Pages that the kernel migrates while they move are where the agent believes them to be. */
static void a_compacted_host_loses_nothing(void)
{
	int fd = open("/proc/sys/vm/compact_memory", O_WRONLY | O_CLOEXEC);
	pthread_t compactor;

	if (fd < 0) {
		printf("memory may not be compacted here: not tested\n");
		return;
	}
	atomic_store(&compacts, true);
	CHECK_EQ(pthread_create(&compactor, NULL, compact, &fd), 0);
	passes("model", "25");
	passes("allocator", "0");
	atomic_store(&compacts, false);
	pthread_join(compactor, NULL);
	close(fd);
}

/* Its memory is the kernel's until then. */
static void a_limit_may_be_met_late(uint64_t seed)
{
	struct isw_engine_stats stats;

	for (uint32_t turn = 1; turn <= 4; turn++)
		(void)ends_well(turn % 2 != 0 ? "allocator" : "discards", "0",
				1 + (seed >> turn) % 200);
	(void)ends_well("rests", "0", 300);
	stats = ends_well("model", "600", 60);
	CHECK(stats.pages_out > 1024 && stats.pages_in > 512);
	/* And where it is not, nothing leaves. */
	stats = ends_well("model", "20", ALWAYS_FREE);
	CHECK_EQ(stats.pages_out, 0);
}

static void a_killed_job_leaves_nothing(void)
{
	struct device d;
	struct job job;

	start_device(&d);
	job = start_job("until", "0", d.job_end);
	wait_for_word(&job);
	while (far_used(&d) == 0)
		pause_ms(1);
	CHECK_EQ(kill(job.pid, SIGKILL), 0);
	CHECK(WIFSIGNALED(end_of(&job)));
	end_device(&d);
}

/* ------------------------------------------------------------------- any program */

/* Until nobody has the other end: what leaves and comes back is used in between. */
static void pass_on(int says)
{
	struct pollfd ready = {.fd = says, .events = POLLIN};
	char bytes[65536];

	for (uint32_t turn = 0;; turn++) {
		ssize_t got;

		write_usage(turn % 2 == 0 ? LIMIT - 8 * MIB : LIMIT - 96 * MIB);
		if (poll(&ready, 1, TURN_MS) == 0)
			continue;
		got = read(says, bytes, sizeof(bytes));
		if (got <= 0)
			return;
		CHECK_EQ(fwrite(bytes, 1, (size_t)got, stdout), (size_t)got);
	}
}

static int run_program(char *argv[])
{
	struct device d;
	struct isw_engine_stats stats;
	struct job job;
	int status;

	start_device(&d);
	job = start_program(argv[0], argv, directory, d.job_end);
	pass_on(job.says);
	status = end_of(&job);
	isw_engine_stats(d.engine, &stats);
	fprintf(stderr, "far: %llu MiB out, %llu MiB in\n",
		(unsigned long long)stats.pages_out / 256,
		(unsigned long long)stats.pages_in / 256);
	end_device(&d);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* ------------------------------------------------------------------- its ends */

/* Everything has left; then there is room, so blocks that are read in order come ahead. */
static void what_comes_ahead_is_what_left(void)
{
	struct device d;
	struct job job;

	start_device(&d);
	job = start_job("lost", "0", d.job_end);
	wait_for_word(&job);
	while (far_used(&d) == 0)
		pause_ms(1);
	write_usage(LIMIT - 128 * MIB);
	write_file("far_job.end", "");
	CHECK_EQ(end_of(&job), 0);
	unlink("far_job.end");
	write_usage(LIMIT - 8 * MIB);
	end_device(&d);
}

static void lost_bytes_are_never_zeros(void)
{
	struct device d;
	struct job job;
	int status;

	start_device(&d);
	job = start_job("lost", "0", d.job_end);
	wait_for_word(&job);
	while (far_used(&d) == 0)
		pause_ms(1);
	for (uint32_t i = 0; i < d.donor.slabs; i++)
		CHECK_EQ(isw_slab_unmap(d.engine, i, 0, d.donor.generations[i]), 0);
	write_file("far_job.end", "");
	status = end_of(&job);
	unlink("far_job.end");
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
	isw_frontend_destroy(d.frontend);
	isw_engine_destroy(d.engine);
	isw_store_destroy(d.donor.store);
	close(d.job_end);
}

/* ------------------------------------------------------------------- take-overs */

struct ledger {
	struct far_donor donor;
	atomic_uint tickets; /* made so far, one for each life */
};

/* One life of a device's process: served until it is killed. */
static int live(uint32_t life)
{
	struct ledger *ledger =
		mmap(NULL, sizeof(*ledger), PROT_READ | PROT_WRITE, MAP_SHARED, LEDGER_FD, 0);
	struct isw_engine_config config = far_engine_config(FAR_BYTES, STATE_FD, KEY_FD);
	struct isw_error error = {0};
	isw_engine *e;
	char go;

	CHECK(ledger != MAP_FAILED);
	if (life)
		config.flags |= ISW_ENGINE_STANDBY;
	CHECK_OK(isw_engine_create(&config, NULL, &e, &error), error);
	if (life) {
		CHECK_EQ(read(GO_FD, &go, 1), 1);
		CHECK_OK(isw_engine_take_over(e, NULL, &error), error);
	}
	while (atomic_load(&ledger->tickets) <= life)
		pause_us(1000);
	use_far_donor(e, &ledger->donor, life);
	start_far(e, TABLE_FD, JOB_FD);
	CHECK_EQ(write(SERVED_FD, "", 1), 1);
	for (;;)
		pause();
}

struct process {
	pid_t pid;
	int go, served;
};

static struct process spawn_device(uint32_t life, const int fds[5])
{
	static const int numbers[] = {JOB_FD, STATE_FD, TABLE_FD, KEY_FD, LEDGER_FD};
	char number[16], *argv[] = {"test_far_job", "live", number, NULL};
	posix_spawn_file_actions_t actions;
	struct process process;
	int go[2], served[2];

	snprintf(number, sizeof(number), "%u", life);
	CHECK_EQ(pipe2(go, O_CLOEXEC), 0);
	CHECK_EQ(pipe2(served, O_CLOEXEC), 0);
	posix_spawn_file_actions_init(&actions);
	for (size_t i = 0; i < ISWI_ARRAY_LEN(numbers); i++)
		posix_spawn_file_actions_adddup2(&actions, fds[i], numbers[i]);
	posix_spawn_file_actions_adddup2(&actions, go[0], GO_FD);
	posix_spawn_file_actions_adddup2(&actions, served[1], SERVED_FD);
	CHECK_EQ(posix_spawn(&process.pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
	posix_spawn_file_actions_destroy(&actions);
	close(go[0]);
	close(served[1]);
	process.go = go[1];
	process.served = served[0];
	return process;
}

static void wait_served(const struct process *process)
{
	char byte;

	CHECK_EQ(read(process->served, &byte, 1), 1);
}

static void bury(const struct process *process)
{
	int status;

	CHECK_EQ(waitpid(process->pid, &status, 0), process->pid);
	close(process->go);
	close(process->served);
}

/* A job whose device's process is one that may be killed. */
struct lives {
	struct ledger *ledger;
	struct process active;
	uint32_t life;
	int fds[5]; /* the job's socket, state, table, key, ledger */
	int job_end;
};

static void begin_lives(struct lives *l)
{
	int pair[2], ledger_fd = memfd_create("ledger", MFD_CLOEXEC), key;
	struct isw_error error = {0};

	CHECK_EQ(ftruncate(ledger_fd, sizeof(*l->ledger)), 0);
	l->ledger =
		mmap(NULL, sizeof(*l->ledger), PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd, 0);
	CHECK(l->ledger != MAP_FAILED);
	make_far_donor(&l->ledger->donor, FAR_BYTES);
	atomic_store(&l->ledger->tickets, 1);
	CHECK_OK(isw_seal_key_make(&key, &error), error);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	l->fds[0] = pair[0];
	l->fds[1] = memfd_create("state", MFD_CLOEXEC);
	l->fds[2] = memfd_create("table", MFD_CLOEXEC);
	l->fds[3] = key;
	l->fds[4] = ledger_fd;
	l->job_end = pair[1];
	l->life = 0;
	l->active = spawn_device(0, l->fds);
	wait_served(&l->active);
}

/* The active one is killed, and that one takes over. */
static void kill_device(struct lives *l, struct process standby)
{
	CHECK_EQ(kill(l->active.pid, SIGKILL), 0);
	CHECK_EQ(write(standby.go, "", 1), 1);
	CHECK_EQ(lease_renew(l->ledger->donor.store, l->ledger->donor.lease, REAL_WAIT_MS,
			     l->ledger->donor.ticket),
		 0);
	atomic_store(&l->ledger->tickets, ++l->life + 1);
	wait_served(&standby);
	bury(&l->active);
	l->active = standby;
}

/* Nothing of any job's is left in the table, whoever was killed at what moment. */
static void wait_table_empty(const struct lives *l)
{
	const struct iswi_far_kept *kept;
	uint32_t used = 1;

	kept = mmap(NULL, sizeof(*kept) + FAR_BYTES / ISWF_BLOCK_BYTES * sizeof(kept->block[0]),
		    PROT_READ, MAP_SHARED, l->fds[2], 0);
	CHECK(kept != MAP_FAILED);
	for (uint32_t tries = 0; used > 0; tries++) {
		CHECK(tries < 20000);
		pause_ms(1);
		used = 0;
		for (uint32_t i = 0; i < kept->blocks; i++)
			used += atomic_load(&kept->block[i].owner) != 0;
		for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
			used += atomic_load(&kept->clients[i].used) != 0;
	}
}

static void end_lives(struct lives *l)
{
	wait_table_empty(l);
	CHECK_EQ(kill(l->active.pid, SIGKILL), 0);
	bury(&l->active);
	for (size_t i = 0; i < ISWI_ARRAY_LEN(l->fds); i++)
		close(l->fds[i]);
	close(l->job_end);
	isw_store_destroy(l->ledger->donor.store);
	munmap(l->ledger, sizeof(*l->ledger));
}

static void end_job(const struct job *job)
{
	write_file("far_job.end", "");
	CHECK_EQ(end_of(job), 0);
	unlink("far_job.end");
}

/* The device's process is killed again and again while the program runs. */
static void a_killed_device_costs_nothing(uint32_t deaths, uint64_t seed)
{
	uint64_t random = seed | 1;
	struct lives l;
	struct job job;

	begin_lives(&l);
	job = start_job("until", "0", l.job_end);
	wait_for_word(&job);
	for (uint32_t i = 0; i < deaths; i++) {
		struct process standby = spawn_device(l.life + 1, l.fds);

		pause_ms(20 + below(&random, 300));
		kill_device(&l, standby);
	}
	pause_ms(200);
	end_job(&job);
	end_lives(&l);
}

/* The second kill comes while the clients of the first are still coming back. */
static void a_device_killed_twice_costs_nothing(uint32_t times, uint64_t seed)
{
	uint64_t random = seed | 1;
	struct lives l;
	struct job job;

	begin_lives(&l);
	job = start_job("until", "0", l.job_end);
	wait_for_word(&job);
	for (uint32_t i = 0; i < times; i++) {
		struct process first = spawn_device(l.life + 1, l.fds);
		struct process second = spawn_device(l.life + 2, l.fds);

		pause_ms(50 + below(&random, 100));
		kill_device(&l, first);
		pause_ms(below(&random, 100));
		kill_device(&l, second);
	}
	pause_ms(200);
	end_job(&job);
	end_lives(&l);
}

/* A process of the job is killed, and before its blocks are free the device's process, too. */
static void a_client_that_ends_with_the_device_leaves_nothing(uint32_t times, uint64_t seed)
{
	uint64_t random = seed | 1;
	struct job job, other;
	struct lives l;

	begin_lives(&l);
	job = start_job("until", "0", l.job_end);
	wait_for_word(&job);
	for (uint32_t i = 0; i < times; i++) {
		struct process standby = spawn_device(l.life + 1, l.fds);

		other = start_job("until", "0", l.job_end);
		wait_for_word(&other);
		pause_ms(below(&random, 50));
		CHECK_EQ(kill(other.pid, SIGKILL), 0);
		pause_us(below(&random, 3000));
		kill_device(&l, standby);
		CHECK(WIFSIGNALED(end_of(&other)));
	}
	pause_ms(200);
	end_job(&job);
	end_lives(&l);
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
	const char *set = getenv("INFINISWAP_TEST_FULL");
	bool full = set != NULL && *set != '\0' && strcmp(set, "0") != 0;
	bool runs = argc > 2 && strcmp(argv[1], "run") == 0;
	uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : iswi_now_ns() | 1;
	int code;

	if (argc == 3 && !strcmp(argv[1], "live"))
		return live((uint32_t)strtoul(argv[2], NULL, 10));
	if (!kernel_moves())
		SKIP("needs userfaultfd with MOVE (Linux 6.8)");
	make_directory();
	if (runs) {
		code = run_program(argv + 2);
		remove_directory();
		return code;
	}
	printf("seed %llu\n", (unsigned long long)seed);
	fflush(stdout);
	if (argc >= 3) {
		if (argc == 5)
			(void)ends_well(argv[2], argv[3], strtoull(argv[4], NULL, 10));
		else
			passes(argv[2], argc == 4 ? argv[3] : "0");
		remove_directory();
		return 0;
	}
	if (SANITIZED) {
		passes("allocator", "0");
		passes("model", "10");
	} else {
		every_way_passes();
		passes("model", full ? "25" : "10");
		a_compacted_host_loses_nothing();
		a_limit_may_be_met_late(seed);
	}
	a_killed_job_leaves_nothing();
	what_comes_ahead_is_what_left();
	lost_bytes_are_never_zeros();
	a_killed_device_costs_nothing(full && !SANITIZED ? 4 : 2, seed);
	a_device_killed_twice_costs_nothing(full && !SANITIZED ? 2 : 1, seed);
	a_client_that_ends_with_the_device_leaves_nothing(full && !SANITIZED ? 3 : 1, seed);
	remove_directory();
	return 0;
}
