/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent's beginning and end in a process, and its threads. It begins when the program asks an
 * allocator for something large, in the program's own call: a thread that is started inside an
 * allocator's mmap would wait for that allocator (F9). Where something is missing nothing of it
 * stays, the device is told why, and the program's memory is the kernel's.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define VARIABLE    "INFINISWAP_FAR" /* JOB_FD:DEVICE_FD:CGROUP */
#define THREADS     (2 + ISWF_SERVE_THREADS + ISWF_EVICT_THREADS)
#define STACK_BYTES (512u * 1024u) /* one may run the program's exit handlers */
#define NICE_FAULTS (-15)
#define WORK_NS     5000000

#define A (&iswf_agent)

atomic_int iswf_phase;
static pid_t owner; /* the process that the agent is for: a child in its memory is another one */

bool iswf_is_owner(void)
{
	return getpid() == owner;
}

uint64_t iswf_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ------------------------------------------------------------------- threads */

/*
 * A process whose main thread has ended by pthread_exit() ends with its last thread. libc counts
 * ours, too, so it never would: then it is ours to end it.
 */
static atomic_bool main_left;

void iswf_leave_thread(void)
{
	if (iswf_real()->syscall(SYS_gettid) == getpid())
		atomic_store(&main_left, true);
}

static void end_if_alone(void)
{
	struct stat tasks;

	/* Two links, and one for each thread: the ended main one is among them. */
	if (stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink == 2 + 1 + THREADS &&
	    atomic_exchange(&main_left, false))
		exit(0);
}

static void *evict_main(void *arg)
{
	(void)arg;
	for (;;) {
		if (iswf_budget_look())
			iswf_link_tell();
		if (atomic_load_explicit(&main_left, memory_order_relaxed))
			end_if_alone();
		if (iswf_work_once())
			continue;
		pthread_mutex_lock(&A->lock);
		A->parked++;
		do
			iswf_wait(&A->work, WORK_NS);
		while (iswf_has_ended() && !atomic_load(&main_left));
		A->parked--;
		pthread_mutex_unlock(&A->lock);
	}
	return NULL;
}

static const struct thread_kind {
	const char *name;
	void *(*run)(void *);
	uint32_t count;
	bool hurries; /* a thread that faults waits for this one */
} kinds[] = {
	{"far-serve", iswf_serve_main, ISWF_SERVE_THREADS, true},
	{"far-evict", evict_main, ISWF_EVICT_THREADS, false},
	{"far-link", iswf_link_main, 1, false},
	{"far-errand", iswf_errand_main, 1, false},
};

/* The threads wait for its opening: one that cannot be started sends all of them home. */
static struct {
	pthread_mutex_t lock;
	pthread_cond_t decided;
	bool open, dismissed;
	pthread_t threads[THREADS];
	uint32_t threads_count;
	cpu_set_t cpus; /* the program's at its start: it may have pinned a thread since */
	bool cpus_known;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .decided = PTHREAD_COND_INITIALIZER};

static void *thread_main(void *arg)
{
	const struct thread_kind *kind = arg;
	bool open;

	prctl(PR_SET_NAME, kind->name);
	if (gate.cpus_known)
		(void)sched_setaffinity(0, sizeof(gate.cpus), &gate.cpus);
	if (kind->hurries) /* best effort */
		(void)setpriority(PRIO_PROCESS, (id_t)iswf_real()->syscall(SYS_gettid),
				  NICE_FAULTS);
	pthread_mutex_lock(&gate.lock);
	while (!gate.open && !gate.dismissed)
		pthread_cond_wait(&gate.decided, &gate.lock);
	open = gate.open;
	pthread_mutex_unlock(&gate.lock);
	return open ? kind->run(NULL) : NULL;
}

static int start_thread(const struct thread_kind *kind)
{
	void *arg = (void *)(uintptr_t)kind;
	pthread_t *thread = &gate.threads[gate.threads_count];
	pthread_attr_t attr;
	int err = pthread_attr_init(&attr);

	if (err != 0)
		return -err;
	pthread_attr_setstacksize(&attr, STACK_BYTES);
	err = pthread_create(thread, &attr, thread_main, arg);
	pthread_attr_destroy(&attr);
	if (err == EINVAL) /* the program's thread-local variables need more */
		err = pthread_create(thread, NULL, thread_main, arg);
	if (err == 0)
		gate.threads_count++;
	return -err;
}

static int start_threads(void)
{
	int code = 0;

	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		for (uint32_t j = 0; j < kinds[i].count && code == 0; j++)
			code = start_thread(&kinds[i]);
	return code;
}

static void open_gate(bool open)
{
	pthread_mutex_lock(&gate.lock);
	gate.open = open;
	gate.dismissed = !open;
	pthread_cond_broadcast(&gate.decided);
	pthread_mutex_unlock(&gate.lock);
	while (gate.threads_count > 0)
		if (open)
			pthread_detach(gate.threads[--gate.threads_count]);
		else
			pthread_join(gate.threads[--gate.threads_count], NULL);
}

/* ------------------------------------------------------------------- forks */

/*
 * A forked child has no agent and gets nothing of the arena that is not the kernel's. So all that
 * is in use comes home first, and stays, and until the child is made nothing is taken. No lock is
 * held over the fork: other libraries' handlers run meanwhile, in any order, and may wait for
 * threads that need it.
 */
void iswf_before_fork(void)
{
	/* First, whether it is on or not: it may be starting. Pairs with iswf_take(). */
	atomic_fetch_add(&A->forks, 1);
	if (atomic_load(&iswf_phase) == ISWF_ON)
		(void)iswf_do_errand(ISWF_ALL_HOME, NULL, 0, ISWF_WHY_FORK);
}

void iswf_after_fork(void)
{
	atomic_fetch_sub(&A->forks, 1);
}

/* Alone in a copy of the process, whose other threads may have held any lock. */
void iswf_in_child(void)
{
	int phase = atomic_load(&iswf_phase);

	owner = getpid();
	atomic_store(&A->forks, 0); /* other threads' forks are not under way here */
	if (phase != ISWF_ON && phase != ISWF_STARTING)
		return;
	atomic_store(&iswf_phase, ISWF_REFUSED);
	iswf_drop_own();
}

/* What is freed from now on is unmapped: there is an agent still. */
void iswf_end(void)
{
	while (atomic_load(&iswf_phase) == ISWF_STARTING)
		sched_yield();
	if (atomic_load(&iswf_phase) == ISWF_ON)
		(void)iswf_do_errand(ISWF_ALL_HOME, NULL, 0, ISWF_WHY_ENDED);
}

/* ------------------------------------------------------------------- start */

struct settings {
	int job_fd, device_fd;
	const char *cgroup;
};

static bool is_job_socket(int fd)
{
	int domain, type;
	socklen_t bytes = sizeof(domain);

	if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) != 0 || domain != AF_UNIX)
		return false;
	bytes = sizeof(type);
	return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_SEQPACKET;
}

static bool is_device(int fd)
{
	struct stat stat;

	return fd >= 0 && fstat(fd, &stat) == 0 && S_ISCHR(stat.st_mode);
}

/* What the environment says, if the descriptors are what it says: a program that closed all it had
 * may have opened others since, before it executed this one. */
static bool read_settings(struct settings *settings)
{
	char *text = getenv(VARIABLE);

	if (text == NULL)
		return false;
	settings->job_fd = (int)strtol(text, &text, 10);
	if (*text != ':')
		return false;
	settings->device_fd = (int)strtol(text + 1, &text, 10);
	if (*text != ':')
		return false;
	settings->cgroup = text + 1;
	if (!is_device(settings->device_fd))
		settings->device_fd = -1;
	return is_job_socket(settings->job_fd);
}

/* ISWF_OFF_NONE, or why not; what was set up until then is taken away by undo(). */
static enum iswf_off set_up(const struct settings *settings)
{
	uint32_t blocks_max, blocks;
	enum iswf_off off = iswf_look_around(&blocks_max);
	int uffd, code;

	if (off != ISWF_OFF_NONE)
		return off;
	uffd = iswf_memory_open(settings->device_fd);
	if (uffd == -EPERM || uffd == -EACCES)
		return ISWF_OFF_PERMISSION;
	if (uffd < 0)
		return uffd == -EMFILE || uffd == -ENFILE ? ISWF_OFF_RESOURCES : ISWF_OFF_KERNEL;
	if (iswf_budget_open(settings->cgroup) != 0)
		return ISWF_OFF_CGROUP;
	if (start_threads() != 0)
		return ISWF_OFF_THREADS;
	code = iswf_link_open(settings->job_fd, uffd, &blocks);
	if (code != 0)
		return code == -ETIMEDOUT ? ISWF_OFF_DEVICE
		       : code == -EPROTO  ? ISWF_OFF_VERSION
					  : ISWF_OFF_RESOURCES;
	if (blocks > ISWF_BORDER_BLOCKS)
		blocks -= blocks % ISWF_BORDER_BLOCKS;
	if (blocks > ISWF_BLOCKS_MAX)
		blocks = ISWF_BLOCKS_MAX;
	if (blocks > blocks_max)
		blocks = blocks_max;
	if (iswf_arena_init((uint64_t)blocks * ISWF_BLOCK_PAGES) != 0 ||
	    iswf_memory_init(blocks) != 0)
		return ISWF_OFF_ADDRESSES;
	return ISWF_OFF_NONE;
}

/* Nothing of it stays: no thread, no reserved range, no descriptor. */
static void undo(void)
{
	open_gate(false);
	iswf_arena_close();
	iswf_link_close();
	iswf_budget_close();
	iswf_memory_close();
}

bool iswf_start(void)
{
	struct settings settings;
	enum iswf_off off = ISWF_OFF_NONE;
	int phase = atomic_load(&iswf_phase);
	bool known;

	if (phase == ISWF_ON)
		return true;
	if ((phase != ISWF_OFF && phase != ISWF_WANTED) || !iswf_is_owner() ||
	    !atomic_compare_exchange_strong(&iswf_phase, &phase, ISWF_STARTING))
		return false;
	A->ops = &iswf_real_ops;
	iswf_clocks_init();
	known = read_settings(&settings);
	if (known)
		off = set_up(&settings);
	if (known && off == ISWF_OFF_NONE) {
		open_gate(true);
		atomic_store(&iswf_phase, ISWF_ON);
		return true;
	}
	undo();
	if (known)
		iswf_link_refuse(settings.job_fd, off);
	atomic_store(&iswf_phase, ISWF_REFUSED);
	return false;
}

/*
 * What pthread_atfork() calls. Weak: the loader of another C library, whose program a job has
 * started, puts the agent there, too, and would not start it. Nor is the agent wanted beside the
 * allocator of a sanitizer.
 */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *)
	__attribute__((weak));
extern void __asan_init(void) __attribute__((weak));
extern void __hwasan_init(void) __attribute__((weak));
extern void __lsan_init(void) __attribute__((weak));
extern void __msan_init(void) __attribute__((weak));
extern void __tsan_init(void) __attribute__((weak));
extern void *__dso_handle __attribute__((visibility("hidden")));

static bool is_foreign(void)
{
	return __register_atfork == NULL || __asan_init != NULL || __hwasan_init != NULL ||
	       __lsan_init != NULL || __msan_init != NULL || __tsan_init != NULL;
}

/*
 * Descriptors that were inherited for us are spared from the beginning. The handlers of forks are
 * registered here: libc holds a lock while it runs them, and one may be what starts the agent.
 */
__attribute__((constructor)) static void spare_inherited(void)
{
	struct settings settings;

	if (!read_settings(&settings) || is_foreign() ||
	    __register_atfork(iswf_before_fork, iswf_after_fork, iswf_in_child, &__dso_handle) !=
		    0) {
		atomic_store(&iswf_phase, ISWF_REFUSED);
		return;
	}
	owner = getpid();
	iswf_inherit_fd(settings.job_fd);
	if (settings.device_fd >= 0)
		iswf_inherit_fd(settings.device_fd);
	gate.cpus_known = sched_getaffinity(0, sizeof(gate.cpus), &gate.cpus) == 0;
}
