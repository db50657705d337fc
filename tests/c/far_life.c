/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job for the agent that lives a hard life: it forks, executes itself, closes what it finds, gets
 * signals and meets limits. Run by test_far_life.c with the agent preloaded; without sanitizers.
 *
 *     far_life CASE
 *
 * Exits with 0, or 1 after a line that says what was wrong. It runs in a directory where a file
 * "go" tells it to go on.
 */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define PAGE     4096u
#define MIB      (1u << 20)
#define BYTES    (32u * MIB)
#define BEHIND   (512u * MIB) /* the agent has addresses there, and none was used */
#define JOB_FD   600
#define UFFD_FD  601
#define NOBODY   65534u
#define MCL_LATE 4 /* MCL_ONFAULT */

extern char **environ;

static char self[4096];

/* ------------------------------------------------------------------- memory */

static void pause_ms(long ms)
{
	const struct timespec time = {ms / 1000, ms % 1000 * 1000000};

	nanosleep(&time, NULL);
}

static uint64_t tag_of(size_t page, uint64_t seed)
{
	return (page + 1) * 0x9e3779b97f4a7c15ull + seed;
}

static void fill(unsigned char *at, size_t bytes, uint64_t seed)
{
	for (size_t page = 0; page < bytes / PAGE; page++) {
		uint64_t tag = tag_of(page, seed);

		memcpy(at + page * PAGE, &tag, 8);
		memcpy(at + page * PAGE + PAGE - 8, &tag, 8);
	}
}

static bool holds(const unsigned char *at, size_t bytes, uint64_t seed)
{
	for (size_t page = 0; page < bytes / PAGE; page++) {
		uint64_t tag = tag_of(page, seed);

		if (memcmp(at + page * PAGE, &tag, 8) != 0 ||
		    memcmp(at + page * PAGE + PAGE - 8, &tag, 8) != 0)
			return false;
	}
	return true;
}

/* Memory most of which has left by now: the agent evicts all that it can. */
static unsigned char *away(size_t bytes, uint64_t seed)
{
	unsigned char *at = malloc(bytes);

	CHECK(at != NULL);
	fill(at, bytes, seed);
	pause_ms(150);
	return at;
}

static void wait_for_go(void)
{
	printf("begun\n");
	fflush(stdout);
	for (uint32_t i = 0; access("go", F_OK) != 0; i++) {
		CHECK(i < 6000);
		pause_ms(10);
	}
}

/* ------------------------------------------------------------------- this process */

static void limit(int resource, rlim_t most)
{
	const struct rlimit both = {most, most};

	CHECK_EQ(setrlimit((__rlimit_resource_t)resource, &both), 0);
}

static uint32_t entries(const char *directory)
{
	DIR *dir = opendir(directory);
	uint32_t count = 0;

	CHECK(dir != NULL);
	for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
		count += entry->d_name[0] != '.';
	closedir(dir);
	return count;
}

static uint32_t threads(void)
{
	return entries("/proc/self/task");
}

static uint64_t statm_pages(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	unsigned long long pages;

	CHECK(file != NULL);
	CHECK_EQ(fscanf(file, "%llu", &pages), 1);
	fclose(file);
	return pages;
}

/* Without an agent: nothing of one is there, and memory works. */
static int goes_without(void)
{
	uint32_t fds = entries("/proc/self/fd");
	uint64_t pages = statm_pages();
	unsigned char *at = malloc(BYTES);

	CHECK(at != NULL);
	fill(at, BYTES, 1);
	CHECK(holds(at, BYTES, 1));
	CHECK_EQ(threads(), 1);
	CHECK_EQ(entries("/proc/self/fd"), fds);
	CHECK(statm_pages() < pages + 2 * BYTES / PAGE);
	free(at);
	return 0;
}

static int end_of(pid_t pid)
{
	int status;

	CHECK_EQ(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static char *const plain[] = {"far_life", "plain", NULL};

/* A program with an agent, to which only what was meant for it came. */
static int case_plain(void)
{
	unsigned char *at;

	for (int fd = 3; fd < 4096; fd++)
		if (fcntl(fd, F_GETFD) >= 0 && fd != JOB_FD && fd != UFFD_FD) {
			fprintf(stderr, "descriptor %d is here\n", fd);
			return 1;
		}
	at = away(BYTES, 2);
	CHECK(threads() > 1);
	CHECK(holds(at, BYTES, 2));
	free(at);
	return 0;
}

/* ------------------------------------------------------------------- programs */

static int case_exec(void)
{
	unsigned char *at = away(BYTES, 3);
	pid_t pid;

	CHECK_EQ(posix_spawn(&pid, self, NULL, NULL, plain, environ), 0);
	CHECK_EQ(end_of(pid), 0);
	pid = vfork();
	if (pid == 0) {
		execve(self, plain, environ);
		_exit(99);
	}
	CHECK_EQ(end_of(pid), 0);
	CHECK(holds(at, BYTES, 3));
	pid = fork();
	if (pid == 0) { /* as subprocess does it: closes all, then executes */
		if (!holds(at, BYTES, 3) || close_range(3, ~0u, 0) != 0)
			_exit(98);
		execve(self, plain, environ);
		_exit(99);
	}
	CHECK_EQ(end_of(pid), 0);
	CHECK(holds(at, BYTES, 3));
	CHECK_EQ(execve(self, plain, environ), 0);
	return 1;
}

/* Both go on: with the same memory, of which each has its own. */
static int case_fork(void)
{
	unsigned char *at = away(BYTES, 4), *more;
	pid_t pid = fork();

	CHECK(pid >= 0);
	CHECK(holds(at, BYTES, 4));
	fill(at, BYTES, pid == 0 ? 5 : 6);
	more = away(BYTES, 7);
	CHECK(holds(at, BYTES, pid == 0 ? 5 : 6));
	CHECK(holds(more, BYTES, 7));
	CHECK_EQ(threads() > 1, pid != 0);
	if (pid == 0) { /* its own descriptors are what it has */
		CHECK(fcntl(JOB_FD, F_GETFD) >= 0);
		for (int fd = JOB_FD + 2; fd < 2048; fd++)
			CHECK(fcntl(fd, F_GETFD) < 0);
		execve(self, plain, environ);
		_exit(99);
	}
	CHECK_EQ(end_of(pid), 0);
	CHECK(holds(at, BYTES, 6));
	free(at);
	at = realloc(more, 2 * BYTES);
	CHECK(at != NULL && holds(at, BYTES, 7));
	pid = fork(); /* once more, of what is left */
	if (pid == 0)
		_exit(holds(at, BYTES, 7) ? 0 : 97);
	CHECK_EQ(end_of(pid), 0);
	return 0;
}

/* By ways that run no handlers. */
static int case_raw_fork(void)
{
	unsigned char *at = away(BYTES, 26), *more;

	for (int way = 0; way < 2; way++) {
		pid_t pid = way == 0 ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : _Fork();

		CHECK(pid >= 0);
		if (pid == 0) {
			more = malloc(BYTES);
			_exit(holds(at, BYTES, 26) && more != NULL ? 0 : 94);
		}
		CHECK_EQ(end_of(pid), 0);
		CHECK(holds(at, BYTES, 26));
	}
	more = away(BYTES, 27);
	CHECK(holds(more, BYTES, 27));
	return 0;
}

/* The first to ask for memory is a process of its own in this one's memory, and it ends soon. */
static int case_vfork_first(void)
{
	static unsigned char *at;
	pid_t pid = vfork();

	if (pid == 0) {
		at = malloc(BYTES);
		_exit(at == NULL);
	}
	CHECK_EQ(end_of(pid), 0);
	fill(at, BYTES, 28);
	CHECK(holds(at, BYTES, 28));
	free(at);
	return case_plain();
}

/* A lock as an allocator has one: taken over each fork, and held by who asks for memory. */
static pthread_mutex_t library_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool ended;
static _Atomic(unsigned char *) shown;

static void lock_library(void)
{
	void *at;

	pthread_mutex_lock(&library_lock);
	at = malloc(MIB); /* and its handler asks, too */
	CHECK(at != NULL);
	free(at);
}

static void unlock_library(void)
{
	pthread_mutex_unlock(&library_lock);
}

static void *ask_under_lock(void *arg)
{
	uint64_t seed = (uintptr_t)arg;

	while (!atomic_load(&ended)) {
		unsigned char *at;

		pthread_mutex_lock(&library_lock);
		at = malloc(4 * MIB);
		CHECK(at != NULL);
		fill(at, 4 * MIB, seed);
		at = atomic_exchange(&shown, at);
		pthread_mutex_unlock(&library_lock);
		if (at != NULL)
			free(at);
		seed += 2;
	}
	return NULL;
}

/* What it sees in the child is a buffer of some thread's, whole. */
static int look_in_child(const unsigned char *kept)
{
	const unsigned char *at = atomic_load(&shown);
	uint64_t seed;

	if (!holds(kept, BYTES, 8))
		return 96;
	if (at == NULL)
		return 0;
	memcpy(&seed, at, 8);
	return holds(at, 4 * MIB, seed - tag_of(0, 0)) ? 0 : 95;
}

static int case_handlers_of_forks(void)
{
	pthread_t askers[2];
	unsigned char *kept;

	/* Before the agent begins: this handler runs inside of whatever the agent does later. */
	CHECK_EQ(pthread_atfork(lock_library, unlock_library, unlock_library), 0);
	kept = away(BYTES, 8);
	for (uintptr_t i = 0; i < 2; i++)
		CHECK_EQ(pthread_create(&askers[i], NULL, ask_under_lock, (void *)(i + 1)), 0);
	for (int i = 0; i < 30; i++) {
		pid_t pid;

		pause_ms(5);
		pid = fork();
		CHECK(pid >= 0);
		if (pid == 0)
			_exit(look_in_child(kept));
		CHECK_EQ(end_of(pid), 0);
	}
	atomic_store(&ended, true);
	for (int i = 0; i < 2; i++)
		pthread_join(askers[i], NULL);
	CHECK(holds(kept, BYTES, 8));
	return 0;
}

/* ------------------------------------------------------------------- descriptors */

static int case_closes(void)
{
	unsigned char *at = away(BYTES, 9), *more;

	CHECK_EQ(close_range(3, ~0u, 0), 0);
	closefrom(3);
	CHECK_EQ(syscall(SYS_close_range, 3, ~0u, 0), 0);
	for (int fd = 3; fd < 2048; fd++) {
		close(fd);
		syscall(SYS_close, fd);
		dup2(2, fd);
	}
	closefrom(3);
	CHECK(holds(at, BYTES, 9));
	more = away(BYTES, 10);
	CHECK(holds(at, BYTES, 9) && holds(more, BYTES, 10));
	CHECK_EQ(close_range(3, ~0u, CLOSE_RANGE_CLOEXEC), 0);
	CHECK_EQ(execve(self, plain, environ), 0);
	return 1;
}

/* Descriptors of the numbers that it was told are others by now. */
static int case_other_descriptors(void)
{
	int pair[2];

	if (getenv("FAR_LIFE_AGAIN") == NULL) {
		CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
		CHECK_EQ((int)syscall(SYS_dup3, pair[0], JOB_FD, 0), JOB_FD);
		CHECK_EQ(setenv("FAR_LIFE_AGAIN", "1", 1), 0);
		CHECK_EQ(close(pair[0]), 0);
		CHECK_EQ(close(pair[1]), 0);
		execve(self, (char *[]){"far_life", "other-descriptors", NULL}, environ);
		return 1;
	}
	CHECK_EQ(goes_without(), 0);
	CHECK_EQ(close(JOB_FD), 0); /* it is the program's */
	return 0;
}

/* Every number is used while the device's process is another one. */
static int case_full_of_descriptors(void)
{
	unsigned char *at = away(BYTES, 11);

	limit(RLIMIT_NOFILE, 1024);
	while (dup(2) >= 0)
		;
	CHECK_EQ(errno, EMFILE);
	wait_for_go();
	CHECK(holds(at, BYTES, 11));
	fill(at, BYTES, 12);
	pause_ms(100);
	CHECK(holds(at, BYTES, 12));
	return 0;
}

/* ------------------------------------------------------------------- signals */

static atomic_uint handled;
static sigjmp_buf out;
static bool jumps;

static void start_timer(long ns)
{
	struct itimerspec often = {.it_interval.tv_nsec = ns, .it_value.tv_nsec = ns};
	struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
	timer_t timer;

	CHECK_EQ(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
	CHECK_EQ(timer_settime(timer, 0, &often, NULL), 0);
}

static void stop_signals(void)
{
	sigset_t all;

	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
}

static void take_and_give(int number)
{
	/* By mmap: an allocator may be in the middle of something. */
	unsigned char *at =
		mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(at != MAP_FAILED);
	fill(at, 4 * MIB, (uint64_t)number);
	CHECK(holds(at, 4 * MIB, (uint64_t)number));
	CHECK_EQ(munmap(at, 4 * MIB), 0);
	atomic_fetch_add(&handled, 1);
	if (jumps)
		siglongjmp(out, 1);
}

/* It asks for memory in a handler, at any moment, and does not always return from there. */
static int case_signals(void)
{
	unsigned char *volatile kept = away(BYTES, 13);
	volatile uint64_t round = 0;

	signal(SIGUSR1, take_and_give);
	start_timer(3000000);
	while (atomic_load(&handled) < 300) {
		if (sigsetjmp(out, 1) != 0)
			jumps = false;
		unsigned char *at = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE,
					 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		CHECK(at !=
		      MAP_FAILED); /* one that a jump leaves is lost, as it would be without us */
		fill(at, 8 * MIB, ++round);
		CHECK(holds(at, 8 * MIB, round));
		CHECK_EQ(munmap(at, 8 * MIB), 0);
		jumps = round % 7 == 0;
		if (round % 16 == 0)
			CHECK(holds(kept, BYTES, 13));
	}
	stop_signals();
	CHECK(holds(kept, BYTES, 13));
	return 0;
}

static void *first_on_small_stack(void *arg)
{
	(void)arg;
	return away(BYTES, 14);
}

/* The agent begins, and is used, by a thread that has the least of stacks. */
static int case_small_stack(void)
{
	pthread_attr_t attr;
	pthread_t thread;
	void *at;

	CHECK_EQ(pthread_attr_init(&attr), 0);
	CHECK_EQ(pthread_attr_setstacksize(&attr, PTHREAD_STACK_MIN), 0);
	CHECK_EQ(pthread_create(&thread, &attr, first_on_small_stack, NULL), 0);
	CHECK_EQ(pthread_join(thread, &at), 0);
	CHECK(threads() > 1);
	CHECK(holds(at, BYTES, 14));
	free(at);
	return 0;
}

static void *last_thread(void *arg)
{
	unsigned char *at;

	pause_ms(50); /* the main thread has ended: the agent begins without it */
	at = away(BYTES, 21);
	CHECK(holds(at, BYTES, 21));
	pause_ms(50);
	return arg;
}

/* The process ends with its last thread. */
static int case_main_leaves(void)
{
	pthread_t thread;

	CHECK_EQ(pthread_create(&thread, NULL, last_thread, NULL), 0);
	pthread_detach(thread);
	pthread_exit(NULL);
}

static unsigned char *given;

static void on_far_stack(int number)
{
	unsigned char *at = malloc(4 * MIB);

	CHECK(at != NULL);
	fill(at, 4 * MIB, (uint64_t)number);
	CHECK(holds(at, 4 * MIB, (uint64_t)number));
	free(at);
	free(given); /* of the arena: an errand */
	given = NULL;
	atomic_fetch_add(&handled, 1);
}

static void *on_far_thread(void *arg)
{
	on_far_stack(15);
	return arg;
}

/* Stacks in memory that has left: of signals, and of a thread. */
static int case_far_stacks(void)
{
	stack_t stack = {.ss_size = 4 * MIB};
	struct sigaction action = {.sa_handler = on_far_stack, .sa_flags = SA_ONSTACK};
	unsigned char *kept = away(BYTES, 16);
	pthread_attr_t attr;
	pthread_t thread;
	void *at = malloc(4 * MIB);

	stack.ss_sp = malloc(stack.ss_size);
	CHECK(stack.ss_sp != NULL && at != NULL);
	CHECK_EQ(sigaltstack(&stack, NULL), 0);
	CHECK_EQ(sigaction(SIGUSR1, &action, NULL), 0);
	CHECK_EQ(pthread_attr_init(&attr), 0);
	CHECK_EQ(pthread_attr_setstack(&attr, at, 4 * MIB), 0);
	for (uint32_t i = 0; i < 20; i++) {
		given = away(4 * MIB, i);
		CHECK_EQ(raise(SIGUSR1), 0);
		given = away(4 * MIB, i);
		CHECK_EQ(pthread_create(&thread, &attr, on_far_thread, NULL), 0);
		CHECK_EQ(pthread_join(thread, NULL), 0);
		CHECK_EQ(atomic_load(&handled), 2 * (i + 1));
	}
	CHECK(holds(kept, BYTES, 16));
	return 0;
}

/* ------------------------------------------------------------------- limits */

static int case_no_threads(void)
{
	limit(RLIMIT_NPROC, 1);
	CHECK_EQ(setresuid(NOBODY, NOBODY, NOBODY), 0); /* root has no such limit */
	CHECK_EQ(prctl(PR_SET_DUMPABLE, 1), 0);         /* it looks into /proc/self */
	return goes_without();
}

static int case_locked(void)
{
	/* Late: what is touched from now on, not all that libc maps. */
	CHECK_EQ(syscall(SYS_mlockall, MCL_FUTURE | MCL_LATE), 0);
	return goes_without();
}

/* It allows what this program does, and ends a thread that does what only an agent does. */
static void enter_sandbox(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pread64, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = {sizeof(code) / sizeof(code[0]), code};

	CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	CHECK_EQ(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program),
		 0);
}

static int case_sandbox(void)
{
	unsigned char *at = away(BYTES, 22), *more;

	enter_sandbox();
	CHECK(holds(at, BYTES, 22));
	more = away(BYTES, 23);
	CHECK(holds(at, BYTES, 22) && holds(more, BYTES, 23));
	free(at);
	free(more);
	return 0;
}

static int case_in_sandbox(void)
{
	enter_sandbox();
	return goes_without();
}

/* mlockall() of a program that has memory which is far; what it frees is the kernel's. */
static int case_locks_all(void)
{
	unsigned char *at = away(BYTES, 24);

	CHECK_EQ(mlockall(MCL_CURRENT | MCL_LATE), 0);
	CHECK(holds(at, BYTES, 24));
	fill(at, BYTES, 25);
	pause_ms(100);
	CHECK(holds(at, BYTES, 25));
	free(at);
	return 0;
}

/* What others have mapped since where the arena was is theirs. */
static int case_locks_all_again(void)
{
	unsigned char *at = away(BYTES, 24), *behind = at + BEHIND, *mapped;

	CHECK_EQ(mlockall(MCL_CURRENT | MCL_LATE), 0);
	mapped = mmap(behind, MIB, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	CHECK(mapped == behind);
	fill(behind, MIB, 25);
	CHECK_EQ(mlockall(MCL_CURRENT | MCL_LATE), 0);
	CHECK(holds(behind, MIB, 25) && holds(at, BYTES, 24));
	return 0;
}

static int case_few_addresses(void)
{
	limit(RLIMIT_AS, (rlim_t)4096 * MIB);
	return goes_without();
}

static int case_little_data(void)
{
	limit(RLIMIT_DATA, (rlim_t)4096 * MIB);
	return goes_without();
}

/* There are enough for a part: what the agent reserves is an eighth of what is left. */
static int case_many_addresses(void)
{
	const rlim_t most = (rlim_t)20480 * MIB;
	uint64_t before = statm_pages();
	unsigned char *at;

	limit(RLIMIT_AS, most);
	at = away(BYTES, 17);
	CHECK(threads() > 1);
	CHECK(statm_pages() - before < (most / 8 + 256 * MIB) / PAGE);
	CHECK(holds(at, BYTES, 17));
	return 0;
}

static int case_without(void)
{
	return goes_without();
}

/* Switches it off for itself and for what it starts. */
static int case_unset(void)
{
	CHECK_EQ(unsetenv("INFINISWAP_FAR"), 0);
	return goes_without();
}

/* ------------------------------------------------------------------- the device */

static int case_waits(void)
{
	unsigned char *at = away(BYTES, 18);

	wait_for_go();
	CHECK(holds(at, BYTES, 18));
	fill(at, BYTES, 19);
	pause_ms(200);
	CHECK(holds(at, BYTES, 19));
	pause_ms(50);
	return 0;
}

/* Its threads, as a person sees them; the program has pinned the thread that began them. */
static int case_threads(void)
{
	static const char *const names[] = {"far-serve", "far-evict", "far-link", "far-errand"};
	bool seen[4] = {false};
	unsigned char *at;
	cpu_set_t all, one;
	DIR *dir;

	CHECK_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
	CPU_ZERO(&one);
	for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++)
		if (CPU_ISSET(cpu, &all))
			CPU_SET(cpu, &one);
	CHECK_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
	at = away(BYTES, 20);
	dir = opendir("/proc/self/task");
	CHECK(dir != NULL);
	for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
		char path[300], name[32] = "";
		cpu_set_t has;
		int fd, tid = atoi(entry->d_name);

		if (tid == 0 || tid == getpid())
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%d/comm", tid);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		CHECK(fd >= 0 && read(fd, name, sizeof(name) - 1) > 1);
		close(fd);
		name[strcspn(name, "\n")] = '\0';
		for (size_t i = 0; i < 4; i++)
			seen[i] |= strcmp(name, names[i]) == 0;
		CHECK_EQ(sched_getaffinity(tid, sizeof(has), &has), 0);
		CHECK(CPU_EQUAL(&has, &all));
	}
	closedir(dir);
	for (size_t i = 0; i < 4; i++)
		CHECK(seen[i]);
	CHECK(holds(at, BYTES, 20));
	return 0;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(void);
	} cases[] = {
		{"plain", case_plain},
		{"exec", case_exec},
		{"fork", case_fork},
		{"raw-fork", case_raw_fork},
		{"vfork-first", case_vfork_first},
		{"handlers-of-forks", case_handlers_of_forks},
		{"closes", case_closes},
		{"other-descriptors", case_other_descriptors},
		{"full-of-descriptors", case_full_of_descriptors},
		{"signals", case_signals},
		{"small-stack", case_small_stack},
		{"far-stacks", case_far_stacks},
		{"main-leaves", case_main_leaves},
		{"no-threads", case_no_threads},
		{"locked", case_locked},
		{"sandbox", case_sandbox},
		{"in-sandbox", case_in_sandbox},
		{"locks-all", case_locks_all},
		{"locks-all-again", case_locks_all_again},
		{"few-addresses", case_few_addresses},
		{"little-data", case_little_data},
		{"many-addresses", case_many_addresses},
		{"without", case_without},
		{"unset", case_unset},
		{"waits", case_waits},
		{"threads", case_threads},
	};
	ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);

	CHECK(argc == 2 && length > 0);
	self[length] = '\0';
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		if (strcmp(cases[i].name, argv[1]) == 0)
			return cases[i].run();
	return 2;
}
